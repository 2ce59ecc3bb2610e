"""Imports torch in a process of its own and says what it can do."""

from __future__ import annotations

import sys
from typing import Any

from leadout.doctor.child import read_message, send_answer


def main() -> int:
    """Answers with versions, CPU capabilities, and CUDA devices."""
    read_message()
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a shared library that does not load
        send_answer({"error": f"{type(error).__name__}: {error}"})
        return 1
    from engine.ops.number_formats import has_float16_linear, has_native_bfloat16

    capabilities = torch.cpu.get_capabilities()
    is_available = torch.cuda.is_available()
    send_answer(
        {
            "version": torch.__version__,
            "cuda_version": torch.version.cuda,
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "cpu_features": sorted(name for name, value in capabilities.items() if value is True),
            "float16_linear": has_float16_linear(),
            "native_bfloat16": has_native_bfloat16(),
            "devices": [_device(index) for index in range(torch.cuda.device_count())] if is_available else [],
        }
    )
    return 0


def _device(index: int) -> dict[str, Any]:
    import torch

    properties = torch.cuda.get_device_properties(index)
    return {
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "capability": f"{properties.major}.{properties.minor}",
        "peers": [
            other
            for other in range(torch.cuda.device_count())
            if other != index and torch.cuda.can_device_access_peer(index, other)
        ],
    }


if __name__ == "__main__":
    sys.exit(main())
