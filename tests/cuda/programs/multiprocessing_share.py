"""torch.multiprocessing with CUDA tensors: both processes see one memory; Hogwild; events between processes."""

import torch
import torch.multiprocessing as mp
from torch import nn


def consume(inbox, outbox, done):
    shared = inbox.get()
    assert shared.is_cuda and shared.device.index == 1
    outbox.put(("sum", shared.sum().item()))
    shared.mul_(10)
    torch.cuda.synchronize(1)
    outbox.put(("changed", None))
    result = torch.arange(5.0, device="cuda:0")
    outbox.put(("tensor", result))
    done.wait()  # the tensor's memory belongs to this process


def hogwild(model, data, target):
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(5):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(data), target).backward()
        optimizer.step()
    torch.cuda.synchronize()


def main():
    context = mp.get_context("spawn")
    inbox, outbox, done = context.Queue(), context.Queue(), context.Event()
    process = context.Process(target=consume, args=(inbox, outbox, done))
    process.start()
    values = torch.arange(100.0)
    tensor = values.to("cuda:1")
    torch.cuda.synchronize(1)
    inbox.put(tensor)
    assert outbox.get(timeout=60) == ("sum", values.sum().item())
    assert outbox.get(timeout=60)[0] == "changed"
    assert torch.equal(tensor.cpu(), values * 10)
    name, theirs = outbox.get(timeout=60)
    assert name == "tensor" and theirs.is_cuda and theirs.tolist() == [0, 1, 2, 3, 4]
    del theirs
    done.set()
    process.join()
    assert process.exitcode == 0

    torch.manual_seed(0)
    model = nn.Linear(4, 1).cuda()
    model.share_memory()
    data, target = torch.randn(16, 4), torch.randn(16, 1)
    reference = nn.Linear(4, 1)
    reference.load_state_dict(model.state_dict())
    worker = context.Process(target=hogwild, args=(model, data.cuda(), target.cuda()))
    worker.start()
    worker.join()
    assert worker.exitcode == 0
    hogwild(reference, data, target)
    torch.testing.assert_close(model.weight.cpu(), reference.weight, rtol=1e-4, atol=1e-5)


if __name__ == "__main__":
    main()
