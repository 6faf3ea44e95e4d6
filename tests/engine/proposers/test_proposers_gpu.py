"""Every proposer on a CUDA device: its text is the CPU's plain decoding, token for token in fp32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specbench.engine.proposer_table import PROPOSERS
from tests.engine.harness import make_engine, outputs, run
from tests.engine.proposers.test_sharing import engine_of, recorded, sharing_requests

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("proposer", PROPOSERS)
def test_output_equals_the_cpus_plain_decoding(tiny_folder: Path, tmp_path: Path, proposer: str):
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    requests = sharing_requests(seed=3)
    plain = outputs(make_engine(tiny_folder), requests)
    drafts = recorded(tmp_path / "drafts.jsonl", requests, plain)
    for depth in (0, 1):
        engine = engine_of(
            proposer,
            tiny_folder,
            tiny_folder,
            drafts,
            3,
            device="cuda",
            pipeline_depth=depth,
            max_num_batched_tokens=11,
            max_num_seqs=4,
            max_model_len=60,
            num_blocks=19,
            prefix_caching=True,
        )
        results = run(engine, requests)
        assert {name: result.output_token_ids for name, result in results.items()} == plain
        assert sum(step.num_drafted for result in results.values() for step in result.verify_steps) > 0
