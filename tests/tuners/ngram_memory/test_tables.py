"""An adapter whose rows live in a table on disk."""

from __future__ import annotations

import torch

from engram_peft.memory.tables import MappedMultiHeadEmbedding, Table, export_table, open_table

from ...models.engram.tiny import backbone, logits, token_ids
from .adapters import adapted, memories_of


def test_rows_are_the_same_and_asked_for_ahead(tmp_path, monkeypatch):
    model = adapted(backbone())
    expected = logits(model, token_ids())
    memories = memories_of(model)
    for number, memory in enumerate(memories):
        path = tmp_path / f"{number}.safetensors"
        export_table(memory.table, memory.table.head_sizes, path)
        memory.table = MappedMultiHeadEmbedding(open_table(path))
    events: list[tuple[str, Table]] = []
    for kind, own_way in (("prefetch", Table.prefetch), ("gather", Table.gather)):

        def note(self, ids, *args, kind=kind, own_way=own_way):
            events.append((kind, self))
            return own_way(self, ids, *args)

        monkeypatch.setattr(Table, kind, note)
    assert torch.equal(logits(model, token_ids()), expected)
    in_order = [memory.table.table for memory in sorted(memories, key=lambda memory: memory.layer_id)]
    assert events == [(kind, table) for kind in ("prefetch", "gather") for table in in_order]
