"""A DataLoader with workers and pinned memory that feeds a GPU."""

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info


class Squares(Dataset):
    def __len__(self):
        return 50

    def __getitem__(self, index):
        assert not torch.empty(0).is_cuda and get_worker_info() is not None
        return {"x": torch.full((3,), float(index)), "y": index * index, "name": f"sample {index}"}


class Counter(IterableDataset):
    def __iter__(self):
        worker = get_worker_info()
        yield from range(worker.id, 20, worker.num_workers)


class Batch:
    """A type with its own pin_memory, as in the documentation of DataLoader."""

    def __init__(self, samples):
        self.x = torch.stack([sample["x"] for sample in samples])

    def pin_memory(self):
        self.x = self.x.pin_memory()
        return self


if __name__ == "__main__":
    torch.ones(1).cuda()  # the parent has used the GPU before it starts workers
    loader = DataLoader(Squares(), batch_size=8, shuffle=True, num_workers=2, pin_memory=True, persistent_workers=True)
    for _ in range(2):
        totals, count = torch.zeros(3, device="cuda"), 0
        for batch in loader:
            assert batch["x"].is_pinned() and batch["y"].is_pinned() and isinstance(batch["name"][0], str)
            x, y = batch["x"].to("cuda", non_blocking=True), batch["y"].cuda(non_blocking=True)
            assert torch.equal(x[:, 0].square().long(), y)
            totals += x.sum(dim=0)
            count += len(y)
        assert count == 50 and torch.equal(totals.cpu(), torch.full((3,), float(sum(range(50)))))
    seen = [number for batch in DataLoader(Counter(), batch_size=4, num_workers=2) for number in batch.cuda().tolist()]
    assert sorted(seen) == list(range(20))
    own = DataLoader(Squares(), batch_size=25, num_workers=1, collate_fn=Batch, pin_memory=True)
    for batch in own:
        assert batch.x.is_pinned()
        batch.x.to("cuda:1", non_blocking=True)
