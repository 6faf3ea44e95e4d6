"""The engine on a GPU, against floors measured in the same run and against what other engines reached.

    python tools/bench_gpu.py                          (everything; about ten minutes on an H200)
    python tools/bench_gpu.py --only decode verify     (sections; each under two minutes)
    python tools/bench_gpu.py --peers vllm transformers
    python tools/bench_gpu.py --small --device cpu     (tiny shapes: whether it runs; its figures mean nothing)

Weights are random, so times are real and texts mean nothing. tools/gpu_bench/__init__.py says how a step is timed.
Exits 1 when a goal of a section that ran is missed.
"""

import sys

from gpu_bench.main import main

if __name__ == "__main__":
    sys.exit(main())
