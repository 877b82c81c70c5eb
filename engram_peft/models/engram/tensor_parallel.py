"""How transformers shards the tables of n-gram memories over the processes of tensor parallelism (read in transformers 5.24).

Its own styles for embeddings make dense gradients. These leave the forward pass to the table, which knows what to do with a
`DTensor`.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES, TensorParallelLayer


class TableParallel(TensorParallelLayer):
    """A table that is sharded by row or by dimension.

    Args:
        shard_dim (`int`): 0 or 1.
    """

    def __init__(self, shard_dim: int) -> None:
        self.shard_dim = shard_dim

    def shard_param(self, module: Any, param: str, mesh: Any) -> None:
        """Puts a `DTensor` in the place of the weight, before anything is loaded into it."""
        weight = module._parameters[param]
        sharded = distribute_tensor(weight, mesh, [Shard(self.shard_dim)], src_data_rank=None)
        module._parameters[param] = nn.Parameter(sharded, requires_grad=weight.requires_grad)
        module.is_distributed = True


TABLE_BY_ROW, TABLE_BY_DIM = "ngram_table_rowwise", "ngram_table_colwise"
ALL_PARALLEL_STYLES.register(TABLE_BY_ROW, TableParallel(0))
ALL_PARALLEL_STYLES.register(TABLE_BY_DIM, TableParallel(1))
