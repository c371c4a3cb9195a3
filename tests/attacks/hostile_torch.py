"""PyTorch's archives that want to run something: each leaves a mark where it succeeds."""

from __future__ import annotations

import io
import itertools
import json
import pickle
import platform
import shutil
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from modelport.exporters.runtime.output_capture import quiet
from tests.pickle_bomb import PickleBomb

CONFIG = """max_batch_size: 0
input { name: "x" data_type: TYPE_FP32 dims: 4 }
output { name: "y" data_type: TYPE_FP32 dims: 4 }
"""
TORCHSCRIPT = 'backend: "pytorch" platform: "pytorch_libtorch"\n' + CONFIG
EXPORTED = 'backend: "pytorch" platform: "torch_export"\n' + CONFIG
COMPILED = 'backend: "pytorch" platform: "torch_aoti"\n' + CONFIG


_numbers = itertools.count()


class PlainModule(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1


def scripted(forward: str, *more: str) -> bytes:
    """A module with this body of ``forward(x)``, as TorchScript."""
    # torch knows a class by its name, and its methods are defined once.
    module: Any = type(f"Hostile{next(_numbers)}", (torch.jit.ScriptModule,), {})()
    with quiet():
        body = "".join(f"    {line}\n" for line in forward.splitlines())
        for method in (*more, f"def forward(self, x: Tensor) -> Tensor:\n{body}"):
            module.define(method)
        buffer = io.BytesIO()
        torch.jit.save(module, buffer)
    return buffer.getvalue()


def calling(levels: int, times: int) -> bytes:
    """Methods that call each other so many ``times``, so many ``levels`` deep."""
    signature = "(self, x: Tensor) -> Tensor:\n    return "
    methods = [f"def f0{signature}x + 1\n"]
    for level in range(levels):
        inner = "x"
        for _ in range(times):
            inner = f"self.f{level}({inner})"
        methods.append(f"def f{level + 1}{signature}{inner}\n")
    return scripted(f"return self.f{levels}(x)", *methods)


def exported() -> bytes:
    """An archive of ``torch.export.save`` without example inputs."""
    buffer = io.BytesIO()
    with quiet():
        program = torch.export.export(PlainModule(), (torch.rand(4),))
        program._example_inputs = None
        torch.export.save(program, buffer)
    return buffer.getvalue()


def edited(archive: bytes, records: dict[str, Callable[[bytes], bytes] | bytes | None]) -> bytes:
    """``archive`` with records replaced, added or, where they are None, left out."""
    changed, out = dict(records), io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as old, zipfile.ZipFile(out, "w") as new:
        root = old.namelist()[0].partition("/")[0]
        for name in old.namelist():
            content = old.read(name)
            change = changed.pop(name.partition("/")[2], content)
            if change is not None:
                new.writestr(name, change(content) if callable(change) else change)
        for name, change in changed.items():
            assert isinstance(change, bytes)
            new.writestr(f"{root}/{name}", change)
    return out.getvalue()


def bomb(archive: bytes, record: str) -> bytes:
    """``archive`` with a record of spaces that takes a thousandth of what it inflates to."""
    out = io.BytesIO(edited(edited(archive, {record: b""}), {record: None}))
    with zipfile.ZipFile(out, "a") as file:
        name = f"{file.namelist()[0].partition('/')[0]}/{record}"
        file.writestr(name, bytes(9 << 20).replace(b"\0", b" "), zipfile.ZIP_DEFLATED)
    return out.getvalue()


CRASHES = ("nests expressions without end", "computes in too many steps")


def crashing() -> dict[str, bytes]:
    """TorchScript whose code ends the process that parses it, or that first runs it."""
    plain = scripted("return x + 1")
    with zipfile.ZipFile(io.BytesIO(plain)) as archive:
        record = next(name for name in archive.namelist() if name.endswith(".py"))
        head = archive.read(record).decode().rpartition("    return")[0]
    levels, steps = 100_000, 20_000
    nested = f"    return {'(' * levels}x{')' * levels}\n"
    chain = "    x = torch.add(x, 1)\n" * steps + "    return x\n"
    name = record.partition("/")[2]
    bodies = zip(CRASHES, (nested, chain), strict=True)
    return {what: edited(plain, {name: (head + body).encode()}) for what, body in bodies}


def program(archive: bytes, edit: Callable[[dict[str, Any]], None]) -> bytes:
    """``archive`` with its program edited."""

    def change(content: bytes) -> bytes:
        document = json.loads(content)
        edit(document)
        return json.dumps(document).encode()

    return edited(archive, {"models/model.json": change})


def _graph(document: dict[str, Any]) -> dict[str, Any]:
    graph: dict[str, Any] = document["graph_module"]["graph"]
    return graph


def _payload(path: str, pickled: bool) -> bytes:
    meta = {
        "dtype": 7, "sizes": [{"as_int": 0}], "requires_grad": False,
        "device": {"type": "cpu", "index": None}, "strides": [{"as_int": 1}],
        "storage_offset": {"as_int": 0}, "layout": 7,
    }  # fmt: skip
    entry = {"path_name": path, "is_param": False, "use_pickle": pickled, "tensor_meta": meta}
    return json.dumps({"config": {"c": entry}}).encode()


def torchscripts(mark: Path) -> dict[str, tuple[bytes, str]]:
    """TorchScript, and what the refusal names."""
    plain = scripted("return x + 1")
    touch = pickle.dumps(PickleBomb(mark), 2)
    stacked = b"\x80\x04\x8c\x02os\x8c\x06system\x93."
    code = "class M(Module):\n  def __setstate__(self, s: Tensor) -> None:\n    return\n"
    custom = "x: __torch__.torch.classes.quantized.LinearPackedParamsBase\n"
    return {
        "reads a file": (
            scripted(f'return x + torch.from_file("{mark}", False, 4)'),
            "aten::from_file",
        ),
        "writes a file": (scripted(f'torch.save(x, "{mark}")\nreturn x'), "aten::save"),
        "writes a file in a branch": (
            scripted(f'if bool(x.sum() > -1):\n  torch.save(x, "{mark}")\nreturn x'),
            "aten::save",
        ),
        "trusts a size": (
            scripted("return torch.ops.aten._reshape_alias(x, [999], [1])"),
            "aten::_reshape_alias",
        ),
        "changes the indices of a sparse tensor": (
            scripted(
                "s = torch.eye(4).to_sparse()\ns.indices().add_(1 << 40)\nreturn s.to_dense()"
            ),
            "aten::indices",
        ),
        "changes the rows of a sparse tensor": (
            scripted(
                "s = torch.eye(4).to_sparse_csr()\ns.crow_indices().add_(1 << 40)\n"
                "return s.to_dense()"
            ),
            "aten::crow_indices",
        ),
        "makes a sparse tensor of indices that nothing checks": (
            scripted(
                "i = torch.tensor([[1 << 40], [0]])\n"
                "return torch.sparse_coo_tensor(i, x[:1], [4, 1]).to_dense()"
            ),
            "aten::sparse_coo_tensor",
        ),
        "takes weights by their address": (
            scripted("return torch.fbgemm_linear_fp16_weight(x, x, x)"),
            "aten::fbgemm_linear_fp16_weight",
        ),
        "calls functions that double": (calling(30, 2), "inline to more than"),
        "calls functions too deeply": (calling(250, 1), "levels deep"),
        "inflates": (bomb(plain, "code/evil.py"), "inflates to more than 100 times"),
        "inflates weights": (bomb(plain, "data/0"), "inflates to more than 100 times"),
        "uses another namespace": (
            scripted("return torch.ops.mkldnn._reorder_linear_weight(x, None)"),
            "mkldnn::_reorder_linear_weight",
        ),
        "forks": (
            scripted(
                "f = torch.jit.fork(self.go, x)\nreturn torch.jit.wait(f)",
                "def go(self, x: Tensor) -> Tensor:\n    return x\n",
            ),
            "aten::wait",
        ),
        "runs a class while it loads": (edited(plain, {"code/evil.py": code.encode()}), "__setst"),
        "uses a native class": (edited(plain, {"code/evil.py": custom.encode()}), "native code"),
        "pickles a call": (edited(plain, {"data.pkl": touch}), "mkdir' in 'data.pkl'"),
        "pickles a constant": (edited(plain, {"constants.pkl": touch}), "in 'constants.pkl'"),
        "pickles a stacked name": (edited(plain, {"data.pkl": stacked}), "STACK_GLOBAL"),
        "is of an older layout": (edited(plain, {"model.json": b"{}"}), "model.json"),
        "holds bytecode": (edited(plain, {"bytecode.pkl": touch}), "bytecode.pkl"),
    }


def programs(mark: Path) -> dict[str, tuple[bytes, str]]:
    """``torch.export`` programs, and what the refusal names."""
    plain, touch = exported(), pickle.dumps(PickleBomb(mark))
    touch += bytes(-len(touch) % 4)  # a record of floats has whole ones
    call = f"__import__('pathlib').Path({str(mark)!r}).touch()"
    constants = "data/constants/model_constants_config.json"
    weights = "data/weights/model_weights_config.json"

    def opaque(kind: str) -> bytes:
        records = {constants: _payload(f"{kind}_0", False), f"data/constants/{kind}_0": touch}
        return edited(plain, records)  # type: ignore[arg-type]

    def changed(edit: Callable[[dict[str, Any]], None]) -> bytes:
        return program(plain, edit)

    def retarget(target: str) -> bytes:
        return changed(lambda d: _graph(d)["nodes"][0].update(target=target))

    def respecify(spec: object) -> bytes:
        def edit(document: dict[str, Any]) -> None:
            signature = document["graph_module"]["module_call_graph"][0]["signature"]
            signature["in_spec"] = json.dumps(spec)

        return changed(edit)

    def many(join: str, count: int) -> str:
        return join.join(f"s{number}" for number in range(count))

    def resize(text: str) -> bytes:
        size = {"as_expr": {"expr_str": text, "hint": {"as_int": 4}}}

        def edit(document: dict[str, Any]) -> None:
            for value in _graph(document)["tensor_values"].values():
                value["sizes"] = [size]

        return changed(edit)

    enum = {"type": "builtins.dict", "context": '[{"__enum__": true, "fqn": "os:x", "name": "y"}]'}
    default = {"type": "collections.defaultdict", "context": '{"default_factory_module": "os"}'}
    return {
        "unpickles an opaque constant": (opaque("opaque_obj"), "pickled objects"),
        "unpickles a custom constant": (opaque("custom_obj"), "pickled objects"),
        "unpickles a constant": (
            edited(
                plain, {constants: _payload("tensor_0", True), "data/constants/tensor_0": touch}
            ),
            "pickled objects",
        ),
        "unpickles a weight": (
            edited(plain, {weights: _payload("weight_0", True), "data/weights/weight_0": touch}),
            "pickled objects",
        ),
        "unpickles weights of an older layout": (
            edited(plain, {"data/weights/model.pt": touch}),
            "pickled objects",
        ),
        "unpickles its sample inputs": (
            edited(plain, {"data/sample_inputs/model.pt": touch}),
            "pickled objects",
        ),
        "executes a guard": (changed(lambda d: d.update(guards_code=[call])), "is not a size"),
        "ends a guard's message": (
            changed(lambda d: d.update(guards_code=["L['\"+x+\"'].size()[0] == 4"])),
            "is not a size",
        ),
        "evaluates a size": (resize(call), "is not a size"),
        "evaluates a size by sympy's names": (resize("sympify('x')"), "is not a size"),
        "evaluates a size for ever": (resize("9**9**9"), "too complex"),
        "expands a power of a sum": (resize(f"({many('+', 20)})**64"), "too complex"),
        "expands a product of sums": (
            resize("*".join(f"(a{n}+b{n})" for n in range(7))),
            "too complex",
        ),
        "expands a product of sums in a function": (
            resize("Mul(" + ",".join(f"Add(a{n},b{n})" for n in range(7)) + ")"),
            "too complex",
        ),
        "expands a power by a symbol": (resize("(s0+s1)**s2"), "too complex"),
        "compares many symbols": (resize(f"Max({many(',', 65)})"), "too complex"),
        "nests comparisons": (resize("Max(s0,Min(s1," * 33 + "s2" + "))" * 33), "too complex"),
        "nests signs": (resize("-" * 3000 + "s0"), "is "),
        "is a long size": (resize(many("+", 1000)), "is not a size"),
        "nests roots": (resize("sqrt(2+" * 80 + "2" + ")" * 80), "is not a size"),
        "writes a number with millions of digits": (
            resize("ceiling(Float('1e99999999'))"),
            "is not a size",
        ),
        "wants millions of digits": (resize("Float('1', precision=99999999)"), "is not a size"),
        "wants millions of decimals": (resize("Float('1', 99999999)"), "is not a size"),
        "is a long number": (resize(f"Integer('{'9' * 4000}')"), "is not a size"),
        "evaluates the name of a range": (
            changed(lambda d: d.update(range_constraints={call: {"min_val": 0, "max_val": 1}})),
            "is not a size",
        ),
        "reads a file": (retarget("torch.ops.aten.from_file.default"), "from_file"),
        "calls a function of torch": (retarget("torch.hub.load"), "torch.hub.load"),
        "calls a method by name": (retarget("_operator.methodcaller"), "methodcaller"),
        "changes an operator": (retarget("torch.ops.aten.add.__init__"), "add.__init__"),
        "changes all operators": (retarget("torch.ops.aten.__setattr__"), "aten.__setattr__"),
        "changes another namespace": (retarget("torch.ops.prims.__init__"), "prims.__init__"),
        "inflates": (bomb(plain, "models/model.json"), "inflates to more than 100 times"),
        "inflates weights": (
            bomb(plain, "data/weights/weight_0"),
            "inflates to more than 100 times",
        ),
        "calls an extension": (retarget("#evil:op"), "#evil"),
        "calls another library": (retarget("torch.ops.evil.op.default"), "torch.ops.evil"),
        "ends a name in generated code": (
            changed(lambda d: _graph(d)["inputs"].append({"as_tensor": {"name": f"x={call}"}})),
            "is not a name",
        ),
        "ends a keyword in generated code": (
            changed(lambda d: _graph(d)["nodes"][0]["inputs"][0].update(name=f"x={call}")),
            "is not a name",
        ),
        "ends a string in generated code": (
            changed(lambda d: _graph(d)["tensor_values"].update({'x"]+': {}})),
            "is not a name",
        ),
        "imports a module for an enumeration": (respecify([1, enum]), "not a plain container"),
        "imports a module for a default": (respecify([1, default]), "not a plain container"),
        "uses a native class": (
            changed(lambda d: _graph(d).update(custom_obj_values={"o": {}})),
            "custom_obj_values",
        ),
        "takes a native class": (
            changed(lambda d: _graph(d)["inputs"].append({"as_custom_obj": {"name": "o"}})),
            "as_custom_obj",
        ),
        "allocates what it does not hold": (
            edited(
                plain,
                {
                    weights: _payload("weight_0", False).replace(
                        b'"as_int": 0}], "req', b'"as_int": 99999999999}], "req'
                    ),
                    "data/weights/weight_0": b"",
                },
            ),
            "no content",
        ),
        "brings another program": (edited(plain, {"models/other.json": b"{}"}), "other.json"),
        "brings machine code": (
            edited(plain, {"data/aotinductor/model/evil.wrapper.so": b"\x7fELF"}),
            "native code",
        ),
    }


def compiled(folder: Path, mark: Path) -> bytes | None:
    """An AOTInductor archive whose library leaves the mark; None: there is no compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        return None
    source, library = folder / "evil.c", folder / "evil.so"
    source.write_text(
        "#include <stdio.h>\n__attribute__((constructor)) static void run(void)"
        f'{{ FILE *f = fopen("{mark}", "w"); if (f) fclose(f); }}\n'
    )
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    metadata = {"AOTI_DEVICE_KEY": "cpu", "AOTI_PLATFORM": "linux", "AOTI_CPU_ISA": "DEFAULT"}
    metadata["AOTI_MACHINE"] = platform.machine()
    base = "data/aotinductor/model/"
    records: dict[str, Any] = {
        "models/model.json": None,
        f"{base}evil.wrapper.so": library.read_bytes(),
        f"{base}evil.wrapper_metadata.json": json.dumps(metadata).encode(),
    }
    return edited(exported(), records)
