"""Import paths and names of public verl, and module paths of earlier versions.

import verl.utils.torch_functional                 # the module verl.algorithms.torch_functional
from verl.utils.metric import reduce_metrics       # the function of verl.utils.public
from verl.workers.fsdp_workers import CriticWorker  # ImportError: what to use instead
"""

from verl.compat.hook import MOVED, published, published_names

__all__ = ["MOVED", "published", "published_names"]
