"""What of a device can be told before torch is imported, which takes seconds."""

import ctypes
from importlib.util import find_spec
from pathlib import Path

from batchwright.errors import ConfigError

__all__ = ["has_flash", "refuse_attention", "refuse_device"]


def has_flash(*, cuda: bool) -> bool:
    """Whether flash attention can run."""
    return cuda and find_spec("flash_attn") is not None


def refuse_attention(wanted: str, *, cuda: bool, training: bool = True) -> None:
    """Refuse an attention backend that cannot run, on a device that is CUDA or not."""
    if wanted == "flash" and not has_flash(cuda=cuda):
        raise ConfigError(
            "--attention flash needs CUDA and the flash-attn package; use segments, flex or sdpa"
        )
    if wanted == "flex" and training and not cuda:
        raise ConfigError(
            "FlexAttention has no backward pass on the CPU; use --attention segments or sdpa"
        )


def refuse_device(device: str, attention: str) -> None:
    """Refuse what cannot run for want of a driver; what needs torch to tell is refused later."""
    driver = _has_driver()
    if device == "cuda" and not driver:
        raise ConfigError(
            "--device cuda: no CUDA device is here, nor a driver for one; use --device cpu"
        )
    refuse_attention(attention, cuda=driver and device != "cpu")


def _has_driver() -> bool:
    """Whether there may be a device that torch calls CUDA: one of NVIDIA's, or AMD's."""
    if Path("/dev/kfd").exists():
        return True
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True
