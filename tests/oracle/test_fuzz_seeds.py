# Copyright 2026 The Cortado Authors. SPDX-License-Identifier: Apache-2.0
"""The committed seeds of the fuzzers are what fuzz_seeds.py makes of the golden payloads, and reach every codec."""

import pytest
from fuzz_seeds import committed_seeds, names_of, seeds
from oracle import DECODERS, parse
from oracle_frame import decode_file
from test_oracle import CASES


def test_seeds_are_those_of_the_golden_payloads():
    committed, made = committed_seeds(), seeds()
    changed = {seed for seed in committed.keys() | made.keys() if committed.get(seed) != made.get(seed)}
    assert not changed, "tests/oracle/fuzz_seeds.py writes them again"


@pytest.mark.parametrize("fuzzer", ["frame_fuzzer", "codec_variants_fuzzer"])
def test_every_specification_has_a_seed(fuzzer):
    keys = {content[:4] for seed, content in seeds().items() if seed.startswith(fuzzer)}
    assert len(keys) == len(CASES)


def test_files_are_of_every_codec_and_chain():
    files = [content for seed, content in seeds().items() if seed.startswith("codec_file_fuzzer")]
    for file in files:
        decode_file(file)
    assert len(files) == len({names_of(spec) for spec in CASES})
    assert {name for spec in CASES for name, _ in parse(spec)} == set(DECODERS)
