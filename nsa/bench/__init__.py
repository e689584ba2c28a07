"""Benchmarks, traffic counts and the ahead-of-time compile gate: `python -m nsa.bench`.

A benchmark is the file of its name (`__main__.py` lists them). What they share:

    results, options         the report of a run, its printed tables; flags and head shapes
    measure                  alternating timing and peak memory of any step
    implementations, inputs  nsa.ops' functions as calls on random inputs, timed by pass
    baselines                other implementations of attention and NSA
    roofline                 visible pairs, least FLOPs and bytes; rates of chips
    kernel_launches          every launch of the library, for the gate of `aot`:
    compile_gate, hazards      compile without a GPU, read the binary, check limits
    comm_ranks, netns        the rank processes of `comm` and the link between them
"""
