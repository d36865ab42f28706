"""Run SGLang on a CPU without its kernels: `PYTHONPATH=tests/rollout/sglang_cpu SGLANG_USE_CPU_ENGINE=1`.

SGLang imports GPU packages at import. This module, which Python runs at the start of every process, gives them empty
replacements: modules with any attribute. Calling one is an error, so a computation cannot use them.
"""

import importlib.abc
import importlib.machinery
import os
import sys
import types

#: packages that have no build for CPUs here
_PACKAGES = ("sgl_kernel", "torchvision")
#: modules that name kernels for CPUs, which the processor of Qwen-VL imports for other models
_MODULES = ("sglang.srt.models.qwen3_5",)
#: module -> operators, which are declared before it is imported
_OPERATORS = {
    "torchvision._meta_registrations": (
        "torchvision::nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
        "torchvision::qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    ),
}


class _Missing(type):
    """Type of a replacement class, which stands for a function or a class of a missing package."""

    def __getattr__(cls, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return _missing(f"{cls.__name__}.{name}")

    def __call__(cls, *args, **kwargs):
        if cls.is_decorator and len(args) == 1 and callable(args[0]) and not kwargs:
            return args[0]
        raise RuntimeError(f"{cls.__name__} is not available on this CPU")


def _missing(name: str):
    return _Missing(name, (), {"is_decorator": name.rpartition(".")[2].startswith("register")})


class _Module(types.ModuleType):
    """A module with any attribute."""

    __version__ = "0.0"
    __path__: list[str] = []

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        value = _missing(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module of the missing packages."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in _PACKAGES:
            return None
        if sys._getframe(2).f_code.co_name == "find_spec":  # importlib.util.find_spec: whether it is installed
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        return None


class _HostMemory(importlib.abc.MetaPathFinder):
    """Finds SGLang's module of host memory, and lets it allocate memory that is not pinned, which needs CUDA."""

    def find_spec(self, name, path=None, target=None):
        if name != "sglang.srt.mem_cache.pool_host.common":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            allocate = module.alloc_with_host_register
            module.ALLOC_MEMORY_FUNCS["cpu"] = lambda *args, **keys: allocate(*args, **keys | {"pin_memory": False})

        spec.loader.exec_module = exec_module
        return spec


class _OtherModels(_Finder):
    """Replaces `_MODULES`."""

    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self) if name in _MODULES else None


class _Operators(importlib.abc.MetaPathFinder):
    """Declares compiled operators that modules name when they are imported; here they are not compiled. Those of
    torchvision are in its build for CUDA. Without torchvision, `_Finder` replaces it."""

    def __init__(self):
        self.libraries = []  # operators are gone with their library

    def find_spec(self, name, path=None, target=None):
        for operator in _OPERATORS.get(name, ()):
            import torch

            namespace, _, schema = operator.partition("::")
            self.libraries.append(torch.library.Library(namespace, "FRAGMENT"))
            self.libraries[-1].define(schema)
        return None


os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # compiling a rotary embedding takes a minute
sys.meta_path.insert(0, _HostMemory())
sys.meta_path.insert(0, _Operators())
sys.meta_path.insert(0, _OtherModels())
sys.meta_path.append(_Finder())  # after the others: a package that is installed is used
