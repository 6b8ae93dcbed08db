"""Makes `src/phalanx/cuda/kernels/combine.ptx` of `combine.cu`, by NVRTC. Needs no GPU.

    pip install nvidia-cuda-nvrtc-cu12==12.4.127
    python tools/make_kernels.py [--check]

The version matters: another one makes other PTX, and a newer one PTX that older drivers do not know. PTX is for a
virtual GPU; the driver compiles it for the real one when it is loaded.
"""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "src" / "phalanx" / "cuda" / "kernels"
SOURCE, MADE = FOLDER / "combine.cu", FOLDER / "combine.ptx"
OPTIONS = ["--gpu-architecture=compute_70", "--std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true"]


def library() -> ctypes.CDLL:
    """NVRTC of the wheel that is installed."""
    found = importlib.util.find_spec("nvidia.cuda_nvrtc")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("NVRTC is not installed (pip install nvidia-cuda-nvrtc-cu12==12.4.127)")
    return ctypes.CDLL(str(next(Path(found.submodule_search_locations[0], "lib").glob("libnvrtc.so.*"))))


def compile_to_ptx(source: str) -> str:
    """The PTX of a source.

    Raises:
        SystemExit: It has mistakes, which are shown.
    """
    nvrtc = library()
    program = ctypes.c_void_p()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"combine.cu", 0, None, None)
    options = (ctypes.c_char_p * len(OPTIONS))(*(option.encode() for option in OPTIONS))
    failed = nvrtc.nvrtcCompileProgram(program, len(OPTIONS), options)
    size = ctypes.c_size_t()
    if failed:
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
        raise SystemExit(log.value.decode())
    nvrtc.nvrtcGetPTXSize(program, ctypes.byref(size))
    made = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetPTX(program, made)
    return made.value.decode()


def main() -> None:
    """Writes the file, or with `--check` compares it."""
    made = compile_to_ptx(SOURCE.read_text(encoding="utf-8"))
    if "--check" in sys.argv[1:]:
        if MADE.read_text(encoding="utf-8") != made:
            raise SystemExit(f"{MADE.name} is not what {SOURCE.name} makes: run tools/make_kernels.py")
        return
    MADE.write_text(made, encoding="utf-8")
    print(f"{MADE}: {len(made)} bytes")


if __name__ == "__main__":
    main()
