"""The command itself; the modules of its commands are imported when they are typed."""

import errno
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal, get_args

from cyclopts import App, ArgumentCollection, CoercionError, CycloptsError, Parameter

from batchwright import __version__
from batchwright.cli.output import escape_messages, say
from batchwright.errors import BatchwrightError, ConfigError

__all__ = ["app", "main"]

COMMANDS = {
    "data": "Rows to lengths to batch plans to batches.",
    "train": "Train on a batch plan, on a graph, or on questions.",
    "evaluate": "Measure what was trained.",
    "calls": "Call models: run, probe, simulate, cache.",
    "gym": "Play puzzles on a gym server for training samples: run, serve, info.",
    "reward": "Score responses with rules, LLM judges and monitors.",
    "view": "Show runs in a browser, live: are batches, calls and environments full? Only reads.",
    "report": "Show how full batches, calls and environments were: text, JSON, HTML or pictures.",
    "pack": "Check that packed samples do not attend to each other.",
    "models": "Download the small models that need no hub, and list them.",
    "demo": "Go from rows to verified, sharded batch plans, showing every command on the way.",
    "serve": "Serve a model with llama.cpp until Ctrl-C: chat, completions, /health, /metrics.",
    "doctor": (
        "Check versions, extras, disk, clock, ranks, nodes and a timed run of the packing kernels."
    ),
    "prove": (
        "Prove a query from facts and rules: answers by all evidence for them, each with its proof."
    ),
}
"""Every command with its help; its module, of the same name, is imported when it is typed."""

FIELDS = {
    "pack_max_length": ("pack_max_len",),
    "num_epochs": ("epochs",),
    "deadline_s": ("deadline",),
    "difficulty_range": ("difficulty_min", "difficulty_max"),
}
"""Fields of the library whose flags have other names, by the parameters of the commands."""


def _whole_numbers(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Refuse 2.5 where an integer is expected; cyclopts would round it."""
    for argument in arguments:
        kinds = _types(argument.hint)
        if int in kinds and not {float, str} & kinds:
            for token in argument.tokens:
                if "." in token.value:
                    raise CoercionError(token=token, target_type=int, argument=argument)


def _paths(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Refuse an empty path, which is what an unset variable gives: it would be this folder."""
    for argument in arguments:
        if Path in _types(argument.hint):
            for token in argument.tokens:
                if not token.value.strip():
                    name = token.keyword or argument.name.lstrip("-").upper()
                    raise ConfigError(f"{name} is empty; give a path, or . for this folder")


def _types(hint: object) -> set[object]:
    inner = get_args(hint)
    return set().union(*map(_types, inner)) if inner else {hint}


REFUSALS = {
    *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO, errno.EACCES, errno.EPERM),
    *(errno.EROFS, errno.EDQUOT, errno.ESTALE, errno.EAGAIN),
}
"""What the system says when a command can do nothing for it."""

app = App(
    name="batchwright",
    config=(_whole_numbers, _paths),
    help="Keep accelerators, model servers and environments full during LLM and RL training.",
    help_epilogue=(
        "Start with: batchwright demo --out demo. Exit codes: 0 success, 1 an error in one "
        "sentence, 2 wrong usage. --debug shows the traceback."
    ),
    help_format="plaintext",
    version=__version__,
)
for command, words in COMMANDS.items():
    app.command(f"batchwright.cli.{command}:{command}", name=command, help=words)


COMPLETION = re.compile(rb"#compdef batchwright\b|# \w+ completion for batchwright\b")


@app.command(name="--install-completion")
def install_completion(
    *,
    shell: Annotated[
        Literal["zsh", "bash", "fish", "powershell"] | None,
        Parameter(help="Default: the shell this is typed in."),
    ] = None,
    output: Annotated[
        Path | None, Parameter(name=["--output", "-o"], help="Default: where the shell looks.")
    ] = None,
    force: Annotated[
        bool, Parameter(negative="", help="Replace a file that is no completion of this program.")
    ] = False,
) -> None:
    """Install completion for bash, zsh or fish, and load it where the shell begins."""
    # As cyclopts registers it, but imported only when it is typed.
    from cyclopts.completion.install import create_install_completion_command

    if output is not None:
        from batchwright.files import check_output

        check_output(output, COMPLETION, force=force)
    create_install_completion_command(app.install_completion, True)(shell=shell, output=output)


@app.meta.default
def launch(
    *tokens: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
    debug: Annotated[bool, Parameter(negative="", help="Show tracebacks.")] = False,
) -> int:
    """Run one command and turn what it raises into an exit code."""
    return _guarded(lambda: app(tokens, exit_on_error=False, print_error=False), tokens, debug)


def main() -> None:
    """The entry point of the installed command."""
    app.meta.help_format = "plaintext"
    app.meta.suppress_keyboard_interrupt = app.suppress_keyboard_interrupt = False
    escape_messages()
    # Help and version are printed before any command begins, and may meet a closed pipe too.
    outcome = 0

    def run() -> None:
        nonlocal outcome
        outcome = app.meta(result_action="return_value") or 0

    sys.exit(_guarded(run, (), debug=False) or outcome)


def _guarded(run: Callable[[], object], tokens: tuple[str, ...], debug: bool) -> int:
    try:
        run()
        # Here, not at exit: a reader that has gone away shows itself on the last write.
        sys.stdout.flush()
        return 0
    except CycloptsError as error:
        _failed(f"{error} See: {_help_of(tokens)}", debug)
        return 2
    except BatchwrightError as error:
        return _failed(_by_flags(str(error), tokens), debug)
    except BrokenPipeError:
        # The reader closed the pipe (`| head`); nothing is wrong.
        _mute()
        return 0
    except SystemExit as end:
        # The way of rich, which prints the help, to say that the pipe was closed.
        if isinstance(end.__context__, BrokenPipeError):
            return 0
        raise
    except KeyboardInterrupt as stop:
        say(f"stopped: {stop}" if str(stop) else "stopped", err=True)
        return 130
    except MemoryError:
        return _failed(
            "there is not enough memory for this; allow more, or give less data at once", debug
        )
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            _mute()
            return _failed("cannot write the output: no space is left there", debug)
        if isinstance(error, FileNotFoundError) and "usable temporary" in str(error.strerror):
            # Of Python's tempfile, which torch and datasets use.
            return _failed("no temporary folder can be written to; set TMPDIR to one", debug)
        if isinstance(error, OSError) and error.errno in REFUSALS:
            where = f" ({error.filename})" if error.filename else ""
            # What was made half, such as an event loop, would complain when it is collected.
            sys.unraisablehook = lambda _: None
            return _failed(
                f"the system refuses: {error.strerror}{where}; remove the cause and run again",
                debug,
            )
        return _failed(
            f"internal error, {type(error).__name__}: {error}; "
            f"run again with --debug and report the traceback",
            debug,
        )


def _mute() -> None:
    """Give Python's own flush at exit somewhere to write, or it would fail too."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _help_of(tokens: tuple[str, ...]) -> str:
    """The help of the innermost command that was named."""
    chain = app.parse_commands(tokens)[0]
    return " ".join(["batchwright", *chain, "--help"])


def _by_flags(sentence: str, tokens: tuple[str, ...]) -> str:
    """An error of the library with the flags of this command for the fields it names.

    Names with an underscore are fields wherever they stand, unless they were typed (a file may be
    called so); plain words only where they are set (`align=4`, `overflow skip`) or are what must be
    something.
    """
    apps = app.parse_commands(tokens)[1]
    arguments = apps[-1].assemble_argument_collection()
    flags = {
        argument.field_info.name: argument.names[0]
        for argument in arguments
        if argument.names[0].startswith("--")
    }
    for name, own in FIELDS.items():
        if flags.keys() >= set(own):
            flags[name] = " and ".join(flags[parameter] for parameter in own)
    typed = " ".join(tokens)
    chosen = {
        argument.field_info.name: "|".join(
            word for word in _types(argument.hint) if isinstance(word, str) and word.isidentifier()
        )
        for argument in arguments
    }
    for name, flag in flags.items():
        if chosen.get(name):
            sentence = re.sub(rf"(?<![\w'\"`./-]){name}(?= (?:{chosen[name]})\b)", flag, sentence)
        if "_" not in name:
            sentence = re.sub(rf"(?:^|(?<= and )){name}(?= must\b)", flag, sentence)
            sentence = re.sub(rf"(?<![\w'\"`./-]){name}(?==\d)", flag, sentence)
        elif name not in typed:
            field = rf"(?<![\w'\"`./-]){name}(?!\.?\w|['\"`(/])"
            sentence = re.sub(field, flag, sentence)
            sentence = re.sub(rf"^{name.replace('_', ' ')}(?= must\b)", flag, sentence)
    return sentence


def _failed(sentence: str, debug: bool) -> int:
    if debug:
        import traceback

        say(traceback.format_exc().rstrip(), err=True)
    say(f"error: {' '.join(sentence.split())}", err=True)
    return 1
