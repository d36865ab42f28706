"""Import paths of earlier releases and of public verl.

    import verl.engines.hf                             # the module verl.engines.torch_engine
    from verl.utils.metric import reduce_metrics       # the function of verl.utils.py_functional
    from verl.workers.fsdp_workers import CriticWorker  # ImportError: what to use instead

moved      old module path -> new module path. Both are the same module object, so classes keep their identity and
           pickles of earlier releases load.
published  names of public verl, by module: where they are here, or why they are not
hook       the import hook
"""

from verl.compat.hook import published_names
from verl.compat.moved import MOVED
from verl.compat.published import published

__all__ = ["MOVED", "published", "published_names"]
