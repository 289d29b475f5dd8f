"""`batchwright pack`: verify that packed samples do not attend to each other."""

from typing import Annotated, Literal

from cyclopts import App, Parameter

from batchwright.cli.output import Format, show

__all__ = ["pack"]

pack = App(name="pack")


@pack.command
def verify(
    *,
    model: Annotated[str, Parameter(help="tiny, smollm2, a transformers folder or a hub id.")],
    attention: Annotated[
        Literal["auto", "flash", "segments", "sdpa", "flex"],
        Parameter(help="The backend to verify; auto takes the one training would."),
    ] = "auto",
    segments: Annotated[int, Parameter(help="Samples in the row.")] = 5,
    tokens: Annotated[int, Parameter(help="Maximum tokens of the row.")] = 256,
    seed: Annotated[int, Parameter(help="Seed of the tokens.")] = 0,
    format: Format = "text",
) -> None:
    """Change one sample of a packed row and check that no other sample's logits change."""
    import dataclasses

    from batchwright.report.text import table
    from batchwright.train.sft.isolation import verify_isolation

    proof = verify_isolation(model, attention, segments=segments, tokens=tokens, seed=seed)
    rows = [
        [f"sample {number}", f"{own:.3g}", f"{others:.3g}"]
        for number, (own, others) in enumerate(zip(proof.own, proof.others, strict=True))
    ]
    lines = [
        f"{model} with {proof.backend} attention on {proof.device}",
        table(["changed", "its logits change by", "all others by"], rows),
        f"packed compared with unpacked: logits differ by at most {proof.against_alone:.3g}",
        "samples are isolated: no other sample's logits changed",
    ]
    show(dataclasses.asdict(proof), "\n".join(lines), format)
