# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""`cortado codec compress`, `decompress`, `inspect` and `bench` as a user meets them: files, texts, exit codes."""

import contextlib
import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import cortado
import numpy as np
import pytest

PROGRAM = Path(sys.executable).parent / "cortado"
rng = np.random.default_rng(3)


def codec(*arguments, **options):
    options = {"capture_output": True, "text": True, "timeout": 100, **options}
    return subprocess.run([PROGRAM, "codec", *map(str, arguments)], check=False, **options)


def ok(*arguments, **options):
    done = codec(*arguments, **options)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


def refused(exit_code, *arguments):
    done = codec(*arguments)
    assert done.returncode == exit_code, done.stderr
    assert done.stderr.startswith("cortado: ")
    return done.stderr


def save(path, array, version=None):
    with open(path, "wb") as file:
        np.lib.format.write_array(file, array, version=version)
    return path


@pytest.fixture
def gradient(tmp_path):
    return save(tmp_path / "gradient.npy", rng.normal(size=(40, 50)).astype("float32"))


@pytest.fixture
def compressed(gradient):
    path = gradient.with_suffix(".crtf")
    ok("compress", "--codec", "sign", gradient, "-o", path)
    return path


def test_an_input_that_would_be_written_over_while_it_is_read_stays(gradient):
    same = gradient.with_name("same.npy")
    os.link(gradient, same)
    before = gradient.read_bytes()
    assert "is " in refused(2, "compress", "--codec", "sign", gradient, "-o", same)
    assert gradient.read_bytes() == before
    same.unlink()
    ok("compress", "--codec", "sign", gradient, "-o", gradient)  # beside it, then in its place


# ---- compress and decompress ----


@pytest.mark.parametrize("dtype", ["float32", "float16", "uint8"])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (300,), (3, 0), (17, 33), (2, 3, 4)])
@pytest.mark.parametrize("version", [(1, 0), (2, 0)])
def test_npy_files_come_back_as_numpy_writes_them(tmp_path, shape, dtype, version):
    array = np.asarray(rng.normal(size=shape) * 50 + 100).astype(dtype)
    source = save(tmp_path / "in.npy", array, version)
    ok("compress", "--codec", "none", source, "-o", tmp_path / "in.crtf")
    ok("decompress", tmp_path / "in.crtf", "-o", tmp_path / "out.npy")
    expected = save(tmp_path / "expected.npy", array, (1, 0))
    assert (tmp_path / "out.npy").read_bytes() == expected.read_bytes()


def test_the_program_and_python_read_each_other(tmp_path, gradient, compressed):
    array = np.load(gradient)
    assert compressed.read_bytes() == cortado.compress(array, "sign")
    ok("decompress", compressed, "-o", tmp_path / "out.npy")
    np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), cortado.decompress(compressed.read_bytes()))


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16", "uint8"])
@pytest.mark.parametrize("size", [0, 4, 4000])
def test_raw_files_come_back_as_raw_files(tmp_path, dtype, size):
    source = tmp_path / "in.bin"
    source.write_bytes(rng.bytes(size))
    ok("compress", "--codec", "none", "--dtype", dtype, source, "-o", tmp_path / "c")
    ok("decompress", tmp_path / "c", "-o", tmp_path / "out.bin")
    assert (tmp_path / "out.bin").read_bytes() == source.read_bytes()


def test_raw_files_may_have_a_shape(tmp_path):
    array = rng.normal(size=(20, 30)).astype("float32")
    (tmp_path / "in.bin").write_bytes(array.tobytes())
    ok(
        "compress",
        "--codec",
        "acp(rank=2)",
        "--dtype",
        "fp32",
        "--shape",
        "20,30",
        tmp_path / "in.bin",
        "-o",
        tmp_path / "c",
    )
    assert cortado.decompress((tmp_path / "c").read_bytes()).shape == (20, 30)
    text = refused(
        2,
        "compress",
        "--codec",
        "sign",
        "--dtype",
        "fp32",
        "--shape",
        "20,31",
        tmp_path / "in.bin",
        "-o",
        tmp_path / "c",
    )
    assert "it has 600 fp32 values, which do not fill the --shape (20, 31)" in text


def test_bfloat16_in_npy_files_of_ml_dtypes(tmp_path):
    source = tmp_path / "in.npy"
    np.save(source, rng.integers(0, 2**14, size=64, dtype="uint16").view("V2"))
    assert "if these are bfloat16 values, say --dtype bf16" in refused(
        2, "compress", "--codec", "none", source, "-o", tmp_path / "c"
    )
    ok("compress", "--codec", "none", "--dtype", "bf16", source, "-o", tmp_path / "c")
    ok("decompress", tmp_path / "c", "-o", tmp_path / "out.npy")
    assert (tmp_path / "out.npy").read_bytes() == source.read_bytes()


def test_values_at_odd_addresses(tmp_path):
    # Headers of format 1.0 may have any length: these values begin at an odd offset.
    values = rng.normal(size=100).astype("float32")
    text = b"{'descr': '<f4', 'fortran_order': False, 'shape': (100,)}\n".ljust(81)
    (tmp_path / "odd.npy").write_bytes(b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + values.tobytes())
    ok("compress", "--codec", "sign", tmp_path / "odd.npy", "-o", tmp_path / "c")
    assert (tmp_path / "c").read_bytes() == cortado.compress(values, "sign")


def test_chunks_and_seeds(tmp_path, gradient):
    array = np.load(gradient)
    ok("compress", "--codec", "acp(rank=1)", "--chunk-elems", 500, "--seed", 9, gradient, "-o", tmp_path / "c")
    assert (tmp_path / "c").read_bytes() == cortado.compress(array, "acp(rank=1)", seed=9, chunk_elems=500)


def test_pipes_are_read_and_written(gradient):
    done = codec(
        "compress", "--codec", "none", "/dev/stdin", "-o", "/dev/stdout", input=gradient.read_bytes(), text=False
    )
    assert done.returncode == 0
    back = codec("decompress", "/dev/stdin", "-o", "/dev/stdout", input=done.stdout, text=False)
    assert back.stdout == gradient.read_bytes()


# ---- what is refused, and what it says ----


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (
            np.zeros(4, dtype=">f4"),
            'which is big-endian; convert it first: np.save("OUT.npy", np.load("IN.npy").astype(',
        ),
        (
            np.zeros(4, dtype="float64"),
            'dtype "<f8"; codecs take float32, float16, bfloat16 and uint8. Convert it first',
        ),
        (np.zeros((3, 4), dtype="float32", order="F"), "in Fortran order; rewrite it first"),
        (np.zeros(4, dtype=[("a", "f4")]), "whose header is not that of a plain array"),
    ],
)
def test_arrays_that_must_be_converted_first(tmp_path, array, message):
    source = save(tmp_path / "in.npy", array)
    assert message in refused(2, "compress", "--codec", "none", source, "-o", tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_files_that_are_no_arrays(tmp_path, gradient):
    whole = gradient.read_bytes()
    target = tmp_path / "c"

    def compress(content, *options):
        (tmp_path / "in").write_bytes(content)
        return codec("compress", "--codec", "sign", *options, tmp_path / "in", "-o", target)

    assert "say which: --dtype fp32, fp16, bf16 or uint8" in compress(b"hello").stderr
    assert "5 bytes are no whole number of fp32 values" in compress(b"hello", "--dtype", "fp32").stderr
    assert "7000 bytes of data, expected 8000 for (40, 50) fp32" in compress(whole[:-1000]).stderr
    assert "8003 bytes of data, expected 8000 for (40, 50) fp32" in compress(whole + b"abc").stderr
    assert "header cut short: 100 bytes" in compress(whole[:100]).stderr
    assert "cut short: 7 bytes" in compress(whole[:7]).stderr
    assert "format 9.0" in compress(whole[:6] + b"\x09" + whole[7:]).stderr
    assert "leave --dtype out" in compress(whole, "--dtype", "fp16").stderr
    assert "leave --shape out" in compress(whole, "--shape", "2000").stderr
    for at in range(6, 128):
        done = compress(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
        assert done.returncode in (0, 2, 3), done.stderr
    assert compress(whole[:-1000]).returncode == 3


def test_a_wrong_codec_names_the_known_ones(tmp_path, gradient):
    text = refused(2, "compress", "--codec", "sgin", gradient, "-o", tmp_path / "c")
    assert '--codec: not found: unknown codec "sgin"; known are none, cast' in text
    assert "cortado codec list" in text
    assert text == refused(2, "bench", "--codec", "sgin", gradient)


def test_a_codec_that_does_not_take_the_dtype(tmp_path):
    source = save(tmp_path / "in.npy", np.zeros(4, dtype="uint8"))
    assert "takes fp32, fp16 and bf16, got uint8" in refused(
        2, "compress", "--codec", "sign", source, "-o", tmp_path / "c"
    )


def test_files_that_can_not_be_opened(tmp_path, gradient):
    assert "No such file" in refused(1, "compress", "--codec", "none", tmp_path / "nothing.npy", "-o", tmp_path / "c")
    assert "Is a directory" in refused(1, "decompress", tmp_path, "-o", tmp_path / "c")
    assert "No such file" in refused(1, "compress", "--codec", "none", gradient, "-o", tmp_path / "no" / "c")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_is_an_error(gradient):
    assert "/dev/full: input/output error: can't be written" in refused(
        1, "compress", "--codec", "none", gradient, "-o", "/dev/full"
    )


def test_an_error_leaves_the_old_output_alone(tmp_path, compressed):
    target = tmp_path / "out.npy"
    target.write_bytes(b"precious")
    damaged = bytearray(compressed.read_bytes())
    damaged[-1] ^= 1
    compressed.write_bytes(damaged)
    refused(3, "decompress", compressed, "-o", target)
    assert target.read_bytes() == b"precious"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["gradient.crtf", "gradient.npy", "out.npy"]


def test_damage_is_named_with_place_value_and_expectation(tmp_path, compressed):
    whole = compressed.read_bytes()
    target = tmp_path / "out.npy"

    def decompress(content):
        compressed.write_bytes(content)
        return refused(3, "decompress", compressed, "-o", target)

    assert f"{compressed}: corrupt data: header at byte 0: cut short: 20 bytes, expected 32" in decompress(whole[:20])
    assert "payload at byte 123: cut short: 253 bytes, expected 254" in decompress(whole[:-1])
    assert "payload at byte 123: damaged: its checksum is " in decompress(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert "1 bytes follow, expected none" in decompress(whole + b"x")
    assert "header at byte 0: 93 4e 55 4d, expected 43 52 54 46" in decompress(b"\x93NUMPY" + whole[6:])
    assert "fetch it again" in decompress(whole[:-1])
    assert not target.exists()


# ---- inspect ----


def test_inspect_explains_every_byte(compressed):
    sections = [json.loads(line) for line in ok("inspect", "--json", compressed).splitlines()]
    at = 0
    for section in sections:
        assert section["offset"] == at
        at += section["bytes"]
    assert at == compressed.stat().st_size
    names = [section["name"] for section in sections]
    assert names[0] == "magic"
    assert names[-2:] == ["chunk 0 scales", "chunk 0 signs"]
    assert {s["name"]: s["meaning"] for s in sections}["shape"] == "(40 x 50)"
    text = ok("inspect", compressed)
    assert "43 52 54 46" in text
    assert "sign(scale=mean_abs, block=tensor, vote=mean)" in text


def test_inspect_shows_what_is_whole_and_then_the_error(compressed):
    whole = compressed.read_bytes()
    compressed.write_bytes(whole[:110])
    done = codec("inspect", compressed)
    assert done.returncode == 3
    assert "(40 x 50)" in done.stdout
    assert "chunk 0 at byte 99: cut short: 11 bytes, expected 24" in done.stderr


# ---- bench ----

FIELDS = [
    "codec",
    "file",
    "elems",
    "payload_bytes",
    "ratio",
    "relative_l2_error",
    "max_abs_error",
    "encode_bytes_per_s",
    "decode_bytes_per_s",
    "memcpy_bytes_per_s",
]


def test_bench_as_json_has_one_object_a_file_and_codec(tmp_path, gradient):
    other = save(tmp_path / "other.npy", rng.normal(size=999).astype("float16"))
    out = ok("bench", "--json", "--codec", "sign", "--codec", "cast(bf16)", gradient, other)
    rows = [json.loads(line) for line in out.splitlines()]
    assert [(row["codec"].split("(")[0], Path(row["file"]).name) for row in rows] == [
        ("sign", "gradient.npy"),
        ("cast", "gradient.npy"),
        ("sign", "other.npy"),
        ("cast", "other.npy"),
    ]
    for row in rows:
        assert list(row) == FIELDS
        assert min(row["encode_bytes_per_s"], row["decode_bytes_per_s"], row["memcpy_bytes_per_s"]) > 0
    array = np.load(gradient).astype("float64")
    decoded = cortado.decompress(cortado.compress(np.load(gradient), "sign"))
    row = rows[0]
    assert row["elems"] == 2000
    assert row["payload_bytes"] == 4 + 250
    assert row["ratio"] == pytest.approx(8000 / 254)
    assert row["relative_l2_error"] == pytest.approx(np.linalg.norm(array - decoded) / np.linalg.norm(array))
    assert row["max_abs_error"] == pytest.approx(np.abs(array - decoded).max())


def test_bench_as_json_of_a_file_whose_name_is_not_utf_8(tmp_path):
    source = save(tmp_path / os.fsdecode(b"\xff.npy"), np.ones(8, dtype="float32"))
    row = json.loads(ok("bench", "--json", "--codec", "sign", source))
    assert Path(row["file"]).name == "\N{REPLACEMENT CHARACTER}.npy"


def test_bench_as_a_table_fits_100_columns(gradient):
    lines = ok("bench", "--codec", "none", "--codec", "sign(two_means, block=256)", gradient).splitlines()
    assert max(map(len, lines[1:])) <= 100
    head = next(line for line in lines if line.startswith("codec"))
    assert head.split()[:3] == ["codec", "ratio", "rel."]
    none = next(line for line in lines if line.startswith("none "))
    assert none.split()[1:4] == ["1.00", "0", "0"]


def test_bench_of_non_finite_values(tmp_path):
    source = save(tmp_path / "in.npy", np.array([1, np.inf, np.nan], dtype="float32"))
    lossless, sign = (
        json.loads(line) for line in ok("bench", "--json", "--codec", "none", "--codec", "sign", source).splitlines()
    )
    assert (lossless["relative_l2_error"], lossless["max_abs_error"]) == (0, 0)
    assert (sign["relative_l2_error"], sign["max_abs_error"]) == (None, None)


def test_bench_of_one_infinity_has_no_relative_error(tmp_path):
    """The error over an infinite norm was 0, whatever was lost."""
    source = save(tmp_path / "in.npy", np.array([1, -2, np.inf, 3], dtype="float32"))
    for row in ok("bench", "--json", "--codec", "quant(bits=4)", "--codec", "topk(density=0.5)", source).splitlines():
        assert json.loads(row)["relative_l2_error"] is None, row


def test_bench_of_large_values_has_their_error(tmp_path):
    source = save(tmp_path / "in.npy", np.array([3e30, -4e30], dtype="float32"))
    row = json.loads(ok("bench", "--json", "--codec", "topk(density=0.5)", source))
    assert row["relative_l2_error"] == pytest.approx(0.6)


def test_bench_goes_on_after_a_file_that_it_can_not_take(tmp_path, gradient):
    empty = save(tmp_path / "empty.npy", np.zeros((3, 0), dtype="float32"))
    bytes_ = save(tmp_path / "bytes.npy", np.zeros(10, dtype="uint8"))
    done = codec("bench", "--json", "--codec", "sign", empty, bytes_, tmp_path / "missing", gradient)
    assert done.returncode == 2
    assert "the tensor is empty" in done.stderr
    assert "got uint8" in done.stderr
    assert "No such file" in done.stderr
    assert json.loads(done.stdout)["file"] == str(gradient)


# ---- help and progress ----


@pytest.mark.parametrize("command", ["compress", "decompress", "inspect", "bench"])
def test_help_teaches_with_examples(command):
    text = ok(command, "--help")
    assert f"cortado codec {command} " in text
    assert "Example" in text


@pytest.mark.parametrize(
    "arguments",
    [
        ("compress",),
        ("compress", "--codec", "sign", "in.npy"),
        ("compress", "in.npy", "-o", "c"),
        ("compress", "--codec", "sign", "--dtype", "fp64", "in.npy", "-o", "c"),
        ("compress", "--codec", "sign", "--chunk-elems", "-1", "in.npy", "-o", "c"),
        ("decompress", "c"),
        ("inspect",),
        ("bench", "in.npy"),
        ("bench", "--codec", "sign"),
    ],
)
def test_wrong_command_lines_exit_with_2(arguments):
    done = codec(*arguments)
    assert done.returncode == 2
    assert done.stderr != ""


def test_progress_of_large_files_on_a_terminal_only(tmp_path):
    source = tmp_path / "large.bin"
    with open(source, "wb") as file:
        file.truncate(80 << 20)
    arguments = [
        "compress",
        "--codec",
        "sign",
        "--dtype",
        "fp32",
        "--chunk-elems",
        "4194304",
        source,
        "-o",
        tmp_path / "c",
    ]
    assert codec(*arguments).stderr == ""
    terminal, inside = pty.openpty()
    done = codec(*arguments, stdout=subprocess.PIPE, stderr=inside, capture_output=False)
    os.close(inside)
    shown = ""
    with open(terminal, encoding="utf-8", newline="") as lines, contextlib.suppress(OSError):  # EIO: nobody writes now
        while piece := lines.read(1):
            shown += piece
    assert done.returncode == 0
    assert "compress " in shown
    assert " 80 %" in shown
    assert shown.endswith("\x1b[K")
