# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""Seeds of the fuzzers that try every codec, made of the golden payloads.

    python tests/oracle/fuzz_seeds.py     # writes tests/fuzz/corpus/*/*.seed again

Other files of a corpus are kept by hand or were found. The layout of seeds stands in tests/fuzz/codec_case.h.
"""

import struct
import zlib
from pathlib import Path

from oracle import DECODERS, parse
from oracle_frame import DTYPES, fnv1a_64
from test_oracle import CASES, INPUTS

CORPUS = Path(__file__).resolve().parents[1] / "fuzz" / "corpus"


def names_of(spec: str) -> tuple[str, ...]:
    return tuple(name for name, _ in parse(spec))


def codec_case(spec: str, dtype: str, rows: int, cols: int) -> bytes:
    return struct.pack("<IBBH", fnv1a_64(spec.encode()) % 2**32, DTYPES.index(dtype), rows, cols)


def codec_file(spec: str, dtype: str, rows: int, cols: int, payload: bytes) -> bytes:
    """A file of one chunk, as docs/wire_format.md says."""

    def checked(data: bytes) -> bytes:
        return data + struct.pack("<I", zlib.crc32(data))

    names = names_of(spec)
    header = struct.pack("<4s4BQIII", b"CRTF", 1, DTYPES.index(dtype), 1, 2, rows * cols, len(names), len(spec), 0)
    stages = bytes(byte for name in names for byte in (DECODERS[name][0], 1))
    description = struct.pack("<QQ", rows, cols) + stages + spec.encode()
    chunk = struct.pack("<QQI", 0, len(payload), zlib.crc32(payload))
    return checked(header) + checked(description) + checked(chunk) + payload


def seeds() -> dict[str, bytes]:
    """Path below the corpus and content. Files, which cost more to read, have one for each chain of codecs."""
    made = {}
    chains = set()
    for spec, cases in CASES.items():
        names = names_of(spec)
        name = "-".join(names) + f"-{fnv1a_64(spec.encode()) % 2**32:08x}"
        is_first = names not in chains
        chains.add(names)
        for case in cases:
            shape = [INPUTS[case["input"]][key] for key in ("dtype", "rows", "cols")]
            payload = bytes.fromhex(case["payload"])
            is_usual = case["input"] in ("normal_fp32", "codes_uint8")
            # Of the large inputs, which are of two chunks then.
            if is_usual or (case["input"].startswith(("large", "few")) and "chunk_codes=4096" in spec):
                made[f"frame_fuzzer/{name}-{case['input']}.seed"] = codec_case(spec, *shape) + payload
            if is_usual:
                values = bytes.fromhex(INPUTS[case["input"]]["data"])[:96]
                damage = struct.pack("<HB", len(payload) // 2, 1)
                made[f"codec_variants_fuzzer/{name}.seed"] = codec_case(spec, *shape) + damage + values
            if is_usual and is_first:
                made[f"codec_file_fuzzer/{name}.seed"] = codec_file(spec, *shape, payload)
    return made


def committed_seeds() -> dict[str, bytes]:
    return {str(path.relative_to(CORPUS)): path.read_bytes() for path in CORPUS.glob("*/*.seed")}


if __name__ == "__main__":
    for stale in committed_seeds():
        (CORPUS / stale).unlink()
    for seed, content in seeds().items():
        (CORPUS / seed).parent.mkdir(exist_ok=True)
        (CORPUS / seed).write_bytes(content)
