"""What a Triton kernel takes when compiled ahead of time for sm_90."""

import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

TOOL = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def taken(
    kernel: triton.JITFunction,
    warps: int,
    constants: dict[str, object],
    kind: Callable[[str], str],
    registers: int | None = None,
) -> dict[str, int]:
    """Bytes of shared memory, instructions that spill, that run the tensor cores (HGMMA, HMMA) and that store to shared
    memory (STS), registers, stack and local bytes. `kind`: each argument's type, of those that are no constants;
    `registers`: as many as a thread may take.
    """
    signature = {name: "constexpr" if name in constants else kind(name) for name in kernel.arg_names}
    # Pointers and row strides are multiples of 16, as the launches' are; Triton reads it off the values there.
    even = {i: n for i, n in enumerate(kernel.arg_names) if signature[n].startswith("*") or signature[n] == "i32"}
    language = GluonASTSource if kernel.is_gluon() else ASTSource
    source = language(kernel, signature, constants, attrs={(i,): [["tt.divisibility", 16]] for i in even})
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, "maxnreg": registers})
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        usage = _told("--dump-resource-usage", file.name)
        code = _told("-sass", file.name)
    found = {name: int(n) for name, n in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    counts = {"spills": "LDL|STL", "HGMMA": "HGMMA", "HMMA": "HMMA", "STS": "STSM?"}
    return {"shared": made.metadata.shared, **{name: _count(o, code) for name, o in counts.items()}, **found}


def _count(operations: str, code: str) -> int:
    return len(re.findall(rf"\b(?:{operations})\b", code))


def _told(*arguments: str) -> str:
    return subprocess.run([TOOL, *arguments], capture_output=True, text=True, check=True).stdout
