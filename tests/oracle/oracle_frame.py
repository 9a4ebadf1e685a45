# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""Frames and files of docs/wire_format.md."""

import math
import zlib

from oracle import DECODERS, decode, parse
from oracle_floats import Reader, expect

COMPOSITION = 13
DTYPES = ("fp32", "fp16", "bf16", "uint8")


def fnv1a_64(data: bytes) -> int:
    value = 0xCBF29CE484222325
    for byte in data:
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return value


def dtype_of(number: int) -> str:
    expect(number < len(DTYPES), "dtype")
    return DTYPES[number]


def decode_frame(spec: str, frame: bytes) -> bytes:
    """The tensor's bytes; what stands behind the payload is another frame."""
    reader = Reader(frame)
    expect(reader.take(4) == b"CRTD", "magic")
    expect(reader.number("u1") == 1, "version")
    wire_id, version, dtype = (reader.number("u1") for _ in range(3))
    rows, cols, payload_bytes = (reader.number("<u8") for _ in range(3))
    expect(reader.number("<u8") == fnv1a_64(frame[:32]), "checksum")
    stages = parse(spec)
    expect(wire_id == (DECODERS[stages[0][0]][0] if len(stages) == 1 else COMPOSITION) and version == 1, "codec")
    return decode(spec, reader.take(payload_bytes), dtype_of(dtype), rows, cols)


def decode_file(file: bytes) -> tuple[str, list[int], bytes]:
    """dtype, shape and bytes of the tensor."""
    reader = Reader(file)
    expect(reader.take(4) == b"CRTF", "magic")
    expect(reader.number("u1") == 1, "version")
    dtype, source, dimensions = dtype_of(reader.number("u1")), reader.number("u1"), reader.number("u1")
    chunk_elems = reader.number("<u8")
    stages, spec_bytes, zero = (reader.number("<u4") for _ in range(3))
    expect(reader.number("<u4") == zlib.crc32(file[:28]), "checksum of the header")
    expect(source <= 1 and dimensions <= 32 and stages <= 16 and spec_bytes <= 4096 and zero == 0, "header")
    description = reader.take(8 * dimensions + 2 * stages + spec_bytes)
    expect(reader.number("<u4") == zlib.crc32(description), "checksum of the description")
    described = Reader(description)
    shape = [described.number("<u8") for _ in range(dimensions)]
    ids = [(described.number("u1"), described.number("u1")) for _ in range(stages)]
    spec = described.rest.decode("ascii")
    expect(ids == [(DECODERS[name][0], 1) for name, _ in parse(spec)], "stages")
    rows, cols = (shape[0], math.prod(shape[1:])) if dimensions > 1 else (1, math.prod(shape))
    data, first = b"", 0
    while first < rows * cols:
        count = min(chunk_elems, rows * cols - first)
        payload = read_chunk(reader, first // chunk_elems)
        data += decode(spec, payload, dtype, *((1, count) if rows == 1 else (count // cols, cols)))
        first += count
    reader.end()
    return dtype, shape, data


def read_chunk(reader: Reader, number: int) -> bytes:
    header = reader.rest[:20]
    expect(reader.number("<u8") == number, "number of the chunk")
    payload_bytes, payload_crc = reader.number("<u8"), reader.number("<u4")
    expect(reader.number("<u4") == zlib.crc32(header), "checksum of the chunk's header")
    payload = reader.take(payload_bytes)
    expect(zlib.crc32(payload) == payload_crc, "checksum of the payload")
    return payload
