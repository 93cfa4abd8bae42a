#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""PyTorch's side of peers.py, which starts it: holds one case and runs one contender on it.

One JSON object a line comes in on stdin and one goes out on stdout (peer_comparison.py has the
list). Needs torch only. Besides the contenders it knows the float64 definition ("golden", "judge").
"""

import ctypes
import gc
import json
import math
import os
import sys
import time

try:
    import torch
    import torch.nn.functional as F
except ImportError as e:
    torch, torch_error = None, e

DTYPES = {
    "BF16": "bfloat16",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
    "I64": "int64",
    "I32": "int32",
    "U8": "uint8",
}


class Refused(Exception):
    """One sentence for whoever sent the command."""


# ---- safetensors: 8 bytes of header length, a JSON object of tensors, their bytes


def bytes_of(tensor):
    return (ctypes.c_char * (tensor.numel() * tensor.element_size())).from_address(
        tensor.data_ptr()
    )


def read_safetensors(path):
    tensors = {}
    with open(path, "rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_bytes))
        metadata = header.pop("__metadata__", {})
        for name, info in header.items():
            # Allocated by torch, as a model's weights are: aligned the way its kernels like it.
            tensor = torch.empty(info["shape"], dtype=getattr(torch, DTYPES[info["dtype"]]))
            begin, end = info["data_offsets"]
            if end > begin:
                file.seek(8 + header_bytes + begin)
                file.readinto(bytes_of(tensor))
            tensors[name] = tensor
    return tensors, metadata


def write_safetensors(path, tensors):
    names = {getattr(torch, v): k for k, v in DTYPES.items()}
    header, offset = {}, 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": names[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(bytes(bytes_of(tensor.contiguous())))


# ---- memory


def proc_bytes(key):
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith(key + ":"):
                return int(line.split()[1]) * 1024
    return None


def peak_memory_of(work):
    """How far the resident memory rises while work runs; None where the system does not tell."""
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # the high-water mark starts again at the present level
    except (OSError, AttributeError):
        return None
    before = proc_bytes("VmRSS")
    work()
    return max(proc_bytes("VmHWM") - before, 0)


# ---- contenders


class Contender:
    """One way to compute on a case; each op is a method."""

    def __init__(self, case, options):
        self.case, self.options, self.loss = case, options, None
        self.input = case.input.detach().requires_grad_()
        self.weight = case.weight.detach().requires_grad_()

    def call(self, op):
        getattr(self, op)()

    def step(self):
        """Loss and both gradients, as a training loop does it: fresh gradients each time."""
        self.input.grad = self.weight.grad = None
        self.loss = None
        self.loss = self.mean_loss(self.input, self.weight, self.case.target)
        self.loss.backward()

    def forward(self):
        self.loss = None
        with torch.no_grad():
            self.loss = self.mean_loss(self.input, self.weight, self.case.target)

    def drop(self):
        self.input.grad = self.weight.grad = self.loss = None

    def holds(self, op):
        """Bytes beside the operands that were there before the call."""
        return 0

    def gradients(self):
        return self.input.grad, self.weight.grad


class Eager(Contender):
    """linear, cross_entropy. loss_dtype: of the logits that cross_entropy sees."""

    def mean_loss(self, input, weight, target):
        logits = F.linear(input, weight)
        if self.options["loss_dtype"] == "float32":
            logits = logits.float()
        return F.cross_entropy(logits, target, ignore_index=self.case.ignore_index)


class Compiled(Eager):
    def __init__(self, case, options):
        super().__init__(case, options)
        self.mean_loss = torch.compile(super().mean_loss, dynamic=False)


class LinearCrossEntropy(Contender):
    """torch.nn.functional.linear_cross_entropy."""

    def __init__(self, case, options):
        super().__init__(case, options)
        if not hasattr(F, "linear_cross_entropy"):
            raise Refused(f"torch {torch.__version__} has no linear_cross_entropy (2.13 and newer)")
        self.chunked = None
        if options:
            from torch.nn.modules.linear_cross_entropy_options import LinearCrossEntropyOptions

            wanted = dict(options)
            if "acc_dtype" in wanted:
                wanted["acc_dtype"] = getattr(torch, wanted["acc_dtype"])
            if "batch_chunk_size" in wanted:
                wanted["chunking_method"] = None
            self.chunked = LinearCrossEntropyOptions(**wanted)

    def mean_loss(self, input, weight, target):
        return F.linear_cross_entropy(
            input, weight, target, options=self.chunked, ignore_index=self.case.ignore_index
        )


class Cce(Contender):
    """Apple's cut cross-entropy. Without a GPU only its torch_compile fallback runs."""

    def __init__(self, case, options):
        super().__init__(case, options)
        try:
            from cut_cross_entropy import linear_cross_entropy
        except Exception as e:  # its import needs triton and more, and fails in many ways
            raise Refused(f"cut_cross_entropy cannot be imported: {e}") from e
        self.linear_cross_entropy = linear_cross_entropy

    def mean_loss(self, input, weight, target):
        return self.linear_cross_entropy(
            input, weight, target, impl="torch_compile", ignore_index=self.case.ignore_index
        )


class Logitless(Contender):
    """This library as a PyTorch user calls it."""

    def __init__(self, case, options):
        super().__init__(case, options)
        try:
            from logitless.torch import linear_cross_entropy
        except ImportError as e:
            raise Refused(f"the Python package logitless is not installed there: {e}") from e
        self.linear_cross_entropy = linear_cross_entropy

    def mean_loss(self, input, weight, target):
        return self.linear_cross_entropy(input, weight, target, ignore_index=self.case.ignore_index)


class Bare(Contender):
    """Products alone into memory that is there: what no computation of this kind can beat."""

    def __init__(self, case, options):
        super().__init__(case, options)
        x, w = case.input, case.weight
        self.logits = torch.zeros(x.shape[0], w.shape[0], dtype=x.dtype)
        self.grad_input, self.grad_weight = torch.zeros_like(x), torch.zeros_like(w)

    def product(self):
        torch.mm(self.case.input, self.case.weight.T, out=self.logits)

    def products(self):
        torch.mm(self.case.input, self.case.weight.T, out=self.logits)
        torch.mm(self.logits, self.case.weight, out=self.grad_input)
        torch.mm(self.logits.T, self.case.input, out=self.grad_weight)

    def holds(self, op):
        held = [self.logits]
        if op == "products":
            held += [self.grad_input, self.grad_weight]
        return sum(tensor.numel() * tensor.element_size() for tensor in held)


CONTENDERS = {
    "eager": Eager,
    "compile": Compiled,
    "linear_cross_entropy": LinearCrossEntropy,
    "cce": Cce,
    "logitless": Logitless,
    "bare": Bare,
}


# ---- the definition, in float64


def relative_error(seen, golden):
    golden = golden.double()
    return float((seen.double() - golden).norm() / golden.norm())


class Golden:
    """The mean loss and some rows of both its gradients; logits in blocks of the vocabulary."""

    BLOCK = 4096

    def __init__(self, case):
        x, w, target = case.input.double(), case.weight, case.target
        (BT, _), V = x.shape, w.shape[0]
        counts = target != case.ignore_index
        here = torch.where(counts, target, torch.zeros_like(target))
        grad = counts.double() / counts.sum()
        logsumexp = torch.full((BT,), -math.inf, dtype=torch.float64)
        predicted = (x * w[here].double()).sum(1)
        for begin in range(0, V, self.BLOCK):
            logits = x @ w[begin : begin + self.BLOCK].double().T
            logsumexp = torch.logaddexp(logsumexp, torch.logsumexp(logits, 1))
        self.loss = float(((logsumexp - predicted) * grad).sum())

        # Evenly spread, and words that are targets: their rows of grad_weight are the large ones.
        self.tokens = torch.arange(0, BT, max(BT // 64, 1))
        self.rows = torch.cat([torch.arange(0, V, max(V // 128, 1)), here[self.tokens]]).unique()

        def grad_logits(xs, rows, ids, tokens):
            g = torch.exp(xs @ w[rows].double().T - logsumexp[tokens, None])
            g -= (ids[tokens, None] == rows[None, :]).double()
            return g * grad[tokens, None]

        everyone = torch.arange(BT)
        self.grad_weight = grad_logits(x, self.rows, here, everyone).T @ x
        self.grad_input = torch.zeros(len(self.tokens), x.shape[1], dtype=torch.float64)
        for begin in range(0, V, self.BLOCK):
            rows = torch.arange(begin, min(begin + self.BLOCK, V))
            self.grad_input += (
                grad_logits(x[self.tokens], rows, here, self.tokens) @ w[rows].double()
            )


# ---- commands


class Case:
    pass


class Worker:
    def load(self, request):
        torch.set_num_threads(request["threads"])
        self.contender = None
        tensors, metadata = {}, {}
        for path in request["files"]:
            more, told = read_safetensors(path)
            tensors.update(more)
            metadata.update(told)
        case = self.case = Case()
        case.input, case.weight = tensors["input"], tensors["weight"]
        case.target = tensors["target"].long()
        case.ignore_index = int(metadata.get("ignore_index", -100))
        if case.weight.dtype != case.input.dtype:
            raise Refused(f"input is {case.input.dtype} and weight is {case.weight.dtype}")
        return {
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "BT": case.input.shape[0],
            "V": case.weight.shape[0],
            "H": case.input.shape[1],
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "mkldnn": torch.backends.mkldnn.is_available(),
        }

    def prepare(self, request):
        self.contender = None
        gc.collect()
        self.contender = CONTENDERS[request["contender"]](self.case, request.get("options") or {})
        return {}

    def memory(self, request):
        op, contender = request["op"], self.contender
        # A first call compiles, loads libraries and starts threads; ours is not spared that.
        contender.call(op)
        contender.drop()
        rise = peak_memory_of(lambda: contender.call(op))
        if rise is not None:
            rise += contender.holds(op)
        return {"memory_bytes": rise}

    def run(self, request):
        gc.collect()  # it is off while a call is timed
        cpu = time.process_time()  # of all threads
        start = time.perf_counter()
        self.contender.call(request["op"])
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "cpu_seconds": time.process_time() - cpu}

    def write(self, request):
        grad_input, grad_weight = self.contender.gradients()
        write_safetensors(
            request["file"],
            {
                "grad_input": grad_input[request["tokens"]],
                "grad_weight": grad_weight[request["rows"]],
            },
        )
        return {"loss": float(self.contender.loss)}

    def golden(self, request):
        self.right = Golden(self.case)
        return {
            "loss": self.right.loss,
            "tokens": self.right.tokens.tolist(),
            "rows": self.right.rows.tolist(),
        }

    def judge(self, request):
        seen, _ = read_safetensors(request["file"])
        return {
            "loss": abs(request["loss"] - self.right.loss) / abs(self.right.loss),
            "grad_input": relative_error(seen["grad_input"], self.right.grad_input),
            "grad_weight": relative_error(seen["grad_weight"], self.right.grad_weight),
        }


def main():
    # What libraries print must not meet the replies.
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    worker = Worker()
    gc.disable()
    gc.freeze()
    for line in sys.stdin:
        request = json.loads(line)
        if request["do"] == "quit":
            break
        try:
            if torch is None:
                raise Refused(f"{sys.executable} cannot import torch: {torch_error}")
            reply = getattr(worker, request["do"])(request)
        except Refused as e:
            reply = {"error": str(e)}
        except Exception as e:  # the parent prints it and goes on without this contender
            first = (str(e).strip().splitlines() or ["no reason given"])[0]
            reply = {"error": f"{type(e).__name__}: {first}"}
        replies.write(json.dumps(reply) + "\n")


if __name__ == "__main__":
    main()
