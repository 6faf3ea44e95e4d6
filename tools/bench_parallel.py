"""What splitting a model over GPUs of one machine gains: steps on one and on N, in one run, against floors and goals.

    python tools/bench_parallel.py                                        (two shapes, two GPUs, both kinds of sums)
    python tools/bench_parallel.py --shapes qwen3_8b --batches 16 --ways one_shot
    python tools/bench_parallel.py --shapes inkling_8b --mtp 8
    python tools/bench_parallel.py --small --device cpu                   (whether it runs; its figures mean nothing)

Weights are random, and steps are timed by the rules of tools/bench_gpu.py. A sum is also timed by itself, replayed from
a graph as a step replays it. Exits 1 when a goal is missed.
"""

import sys

from gpu_bench.parallel import main

if __name__ == "__main__":
    sys.exit(main())
