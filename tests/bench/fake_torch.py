# SPDX-License-Identifier: Apache-2.0
"""Stands in for a Python with PyTorch: peers.py's torch worker, with made-up answers.

Started as a Python is: `-c ...` asks for the version, a path starts a worker. Each contender has a
fate: one is fast with one set of options only, one cannot be prepared, one dies at its second call.
"""

import json
import os
import sys

if sys.argv[1] == "-c":
    print("9.9.9")
    sys.exit(0)

SECONDS = {"eager": 0.25, "compile": 0.125, "logitless": 0.5, "bare": 0.0625}
contender, options, calls = "", {}, 0

for line in sys.stdin:
    request = json.loads(line)
    do, reply = request["do"], {}
    if do == "quit":
        break
    if do == "load":
        reply = {"torch": "9.9.9", "threads": request["threads"]}
    elif do == "prepare":
        contender, options, calls = request["contender"], request["options"], 0
        if contender == "cce":
            reply = {"error": "cut_cross_entropy cannot be imported: no such module"}
    elif do == "memory":
        reply = {"memory_bytes": 7 << 20}
    elif do == "run":
        calls += 1
        if options == {"loss_dtype": "float32"} and contender == "eager" and calls == 2:
            sys.exit(print("this one dies", file=sys.stderr) or 3)
        if contender == "linear_cross_entropy":
            best = options.get("acc_dtype") == "bfloat16" and options.get("batch_chunk_size") == 256
            reply = {"seconds": 0.5 if best else 1.0}
        else:
            reply = {"seconds": SECONDS[contender]}
        reply["cpu_seconds"] = 2 * reply["seconds"]
    elif do == "write":
        # What is judged is named by the file; nothing of it is read here.
        open(request["file"], "w").close()
        reply = {"loss": 2.0}
    elif do == "golden":
        reply = {"loss": 2.5, "tokens": [0, 1], "rows": [3]}
    elif do == "judge":
        assert os.path.exists(request["file"])
        reply = {"loss": 0.25, "grad_input": 0.5, "grad_weight": 0.75}
    print(json.dumps(reply), flush=True)
