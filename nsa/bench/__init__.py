"""Benchmarks, traffic counts and the compile check: `python -m nsa.bench`.

Each benchmark is the module of its name; `__main__.py` lists them. Shared modules:

    results, options   JSON report and printed tables; flags and head shapes
    timing             alternating timing and peak memory of any step
    implementations    random inputs, and the functions of nsa.ops on them, timed by pass
    baselines          other implementations of attention and NSA
    roofline           visible (query, key) pairs, minimum FLOPs and bytes; attainable rates
    kernel_launches    records every kernel launch of the library, for `aot`
    compile_check      compiles these without a GPU and checks limits of the binaries
    register_hazards   finds results in a binary that an assembler bug makes wrong
    loops              what each innermost loop of a binary is bound by
    sass               instructions and labels of a binary, for both

`train`, `recipe` and `module` also hold what other benchmarks use: training steps, the recipe's
config, the cases of attention. What only this repository measures is in `python -m tests.bench`.
"""
