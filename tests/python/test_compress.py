# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""cortado.compress and cortado.decompress: NumPy arrays and torch tensors as bytes, and back."""

import cortado
import numpy as np
import pytest
from cortado import CortadoError, SpecError

rng = np.random.default_rng(7)
SHAPES = [(), (0,), (1,), (1000,), (3, 0), (17, 33), (2, 3, 4)]


@pytest.mark.parametrize("dtype", ["float32", "float16", "uint8"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_lossless_codec_gives_back_the_array(shape, dtype):
    array = np.asarray(rng.normal(size=shape) * 50 + 100).astype(dtype)
    back = cortado.decompress(cortado.compress(array, "none"))
    assert back.shape == array.shape
    assert back.dtype == array.dtype
    np.testing.assert_array_equal(back, array)


def test_sign_is_a_32nd_and_has_the_mean_magnitude():
    array = rng.normal(size=(64, 1024)).astype("float32")
    data = cortado.compress(array, "sign")
    assert array.nbytes / 32 < len(data) < array.nbytes / 31
    np.testing.assert_allclose(cortado.decompress(data), np.sign(array) * np.abs(array).mean(), rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "uint8"])
@pytest.mark.parametrize("shape", SHAPES)
def test_torch_tensors_of_every_dtype(shape, dtype):
    torch = pytest.importorskip("torch")
    tensor = (torch.rand(shape) * 100).to(getattr(torch, dtype))
    back = cortado.decompress(cortado.compress(tensor, "none"), framework="torch")
    assert back.dtype == tensor.dtype
    assert torch.equal(back, tensor)


def test_parameters_that_require_gradients_and_views_that_are_not_contiguous():
    torch = pytest.importorskip("torch")
    parameter = torch.nn.Parameter(torch.arange(12.0).reshape(3, 4))
    np.testing.assert_array_equal(cortado.decompress(cortado.compress(parameter, "none")), parameter.detach().numpy())
    array = np.arange(12, dtype="float32").reshape(3, 4)
    for view in (array.T, array[:, ::2], np.asfortranarray(array)):
        np.testing.assert_array_equal(cortado.decompress(cortado.compress(view, "none")), view)


def test_any_address_and_read_only_arrays():
    values = rng.normal(size=100).astype("float32")
    unaligned = np.frombuffer(b"x" + values.tobytes(), dtype=np.uint8)[1:]
    np.testing.assert_array_equal(cortado.decompress(cortado.compress(unaligned, "none")), unaligned)
    values.flags.writeable = False
    assert cortado.compress(values, "sign") == cortado.compress(values.copy(), "sign")


def test_decompress_takes_anything_with_bytes():
    data = cortado.compress(np.ones(3, dtype="float32"), "none")
    for same in (bytearray(data), memoryview(data), np.frombuffer(data, dtype=np.uint8)):
        np.testing.assert_array_equal(cortado.decompress(same), np.ones(3, dtype="float32"))


def test_a_plan_may_be_a_dict_and_seeds_matter_to_codecs_that_draw():
    array = rng.normal(size=(32, 16)).astype("float32")
    data = cortado.compress(array, {"codec": "acp", "rank": 2}, seed=3)
    assert data == cortado.compress(array, "acp(rank=2)", seed=3)
    assert data != cortado.compress(array, "acp(rank=2)", seed=4)


def test_chunks_are_encoded_by_themselves():
    array = np.concatenate([np.full(256, 1), np.full(256, 3)]).astype("float32")
    assert np.unique(cortado.decompress(cortado.compress(array, "sign"))) == [2]
    np.testing.assert_array_equal(cortado.decompress(cortado.compress(array, "sign", chunk_elems=256)), array)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros(3), "codecs take float32, float16, bfloat16 and uint8"),
        (np.zeros(3, dtype=">f4"), "got ndarray of dtype >f4"),
        ([1.0, 2.0], "got list of dtype None"),
        (np.array(["a"]), "got ndarray of dtype <U1"),
    ],
)
def test_what_can_not_be_compressed_is_named(array, message):
    with pytest.raises(SpecError, match=message):
        cortado.compress(array, "none")


def test_wrong_specs_and_dtypes_of_a_codec():
    with pytest.raises(SpecError, match='unknown codec "sgin"'):
        cortado.compress(np.zeros(3, dtype="float32"), "sgin")
    with pytest.raises(SpecError, match="takes fp32, fp16 and bf16, got uint8"):
        cortado.compress(np.zeros(3, dtype="uint8"), "sign")
    with pytest.raises(SpecError, match="framework must be"):
        cortado.decompress(b"", framework="jax")


def test_bfloat16_without_torch_is_refused():
    torch = pytest.importorskip("torch")
    data = cortado.compress(torch.zeros(3, dtype=torch.bfloat16), "none")
    with pytest.raises(SpecError, match='say framework="torch"'):
        cortado.decompress(data)


def test_damaged_bytes_raise_with_the_place():
    data = bytearray(cortado.compress(np.ones(100, dtype="float32"), "sign"))
    for at in range(0, len(data), 7):
        damaged = bytearray(data)
        damaged[at] ^= 4
        with pytest.raises(CortadoError, match="at byte"):
            cortado.decompress(damaged)
    with pytest.raises(CortadoError, match="cut short") as caught:
        cortado.decompress(data[:-1])
    assert caught.value.code == "corrupt data"
    with pytest.raises(CortadoError, match="header at byte 0: cut short: 0 bytes"):
        cortado.decompress(b"")
