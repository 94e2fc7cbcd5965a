"""Compiles every kernel of mla_rope for GPU architectures, without a GPU, and prints what came out as JSON.

Run in a process of its own: ``python compile_mla_rope.py 90 100 120``.
"""

import json
import re
import sys

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from smoke.kernels.mla_rope import triton as kernels

BLOCKS = {"BLOCK_N": 8, "BLOCK_C": 128, "BLOCK_H": 32, "HALF": 32, "ACC": tl.float32}
KEY_VALUE = {"NOPE": 128, "VALUE": 128, **BLOCKS}
VARIANTS = {
    "rotate": (kernels._rotate_kernel, {"COPIED": 512, "INVERSE": False, **BLOCKS}),
    "rotate_back": (kernels._rotate_kernel, {"COPIED": 0, "INVERSE": True, **BLOCKS, "BLOCK_N": 1, "HALF": 20}),
    "key_value": (kernels._key_value_kernel, KEY_VALUE),
    "key_value_grad": (kernels._key_value_grad_kernel, KEY_VALUE),
}


def argument_type(name: str) -> str:
    """Types as a launch in BF16 has them; no stride is known to be 1 or a multiple of 16."""
    pointers = {"p_cos": "*fp32", "p_sin": "*fp32", "p_pos": "*i64"}
    return pointers.get(name, "*bf16") if name.startswith("p_") else "i32"


def facts(kernel, constants: dict, capability: int) -> dict:
    """What the test judges in the generated code."""
    signature = {name: "constexpr" if name in constants else argument_type(name) for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    target = GPUTarget("cuda", capability, 32)
    asm = triton.compile(source, target=target, options={"enable_fp_fusion": False}).asm
    offsets = re.findall(r"tt\.addptr .* : .*, (?:tensor<[\dx]*)?(i\d+)", asm["ttir"])
    products = re.findall(r"arith\.muli .* : (?:tensor<[\dx]*)?(i\d+)", asm["ttir"])
    return {
        "target": re.findall(r"\.target (sm_\d+)", asm["ptx"])[0],
        "cubin_bytes": len(asm["cubin"]),
        "offset_types": sorted(set(offsets)),
        "product_types": sorted(set(products)),
        "fused": len(re.findall(r"\bfma\.", asm["ptx"])),
        "atomics": len(re.findall(r"\b(?:atom|red)\.", asm["ptx"])),
    }


if __name__ == "__main__":
    found = {sm: {name: facts(*variant, int(sm)) for name, variant in VARIANTS.items()} for sm in sys.argv[1:]}
    print(json.dumps(found))
