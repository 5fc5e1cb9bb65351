"""torch.save and torch.load with each form of map_location."""

import os
import tempfile
import zipfile

import torch
from torch import nn

torch.manual_seed(0)
values = torch.randn(5, 4)
content = {"a": values.cuda(0), "b": values.cuda(1).t(), "n": 3, "p": nn.Parameter(values.cuda()), "cpu": values}
second = torch.device("cuda:1")
cases = {
    "nothing": (None, ["cuda:0", "cuda:1", "cuda:0", "cpu"]),
    "cpu": ("cpu", ["cpu"] * 4),
    "string": ("cuda:1", ["cuda:1"] * 4),
    "current": ("cuda", ["cuda:0"] * 4),
    "device": (second, ["cuda:1"] * 4),
    "dictionary": ({"cuda:0": "cuda:1"}, ["cuda:1", "cuda:1", "cuda:1", "cpu"]),
    "to cpu": ({"cuda:0": "cpu", "cuda:1": "cpu"}, ["cpu"] * 4),
    "function": (lambda storage, location: storage, ["cpu"] * 4),
    "to gpu": (lambda storage, location: storage.cuda(1), ["cuda:1"] * 4),
    "default": (lambda storage, location: None, ["cuda:0", "cuda:1", "cuda:0", "cpu"]),
}
with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "checkpoint.pt")
    for zipped in (True, False):
        torch.save(content, path, _use_new_zipfile_serialization=zipped)
        assert zipfile.is_zipfile(path) == zipped
        for name, (map_location, devices) in cases.items():
            for weights_only in (True, False):
                loaded = torch.load(path, map_location=map_location, weights_only=weights_only)
                for key, expected, device in zip("abp", (values, values.t(), values), devices[:3], strict=True):
                    assert str(loaded[key].device) == device, (name, key, loaded[key].device, device)
                    assert torch.equal(loaded[key].detach().cpu(), expected), (name, key)
                assert str(loaded["cpu"].device) == devices[3] and loaded["n"] == 3, name
                assert isinstance(loaded["p"], nn.Parameter) and loaded["p"].requires_grad

    shared = values.cuda()
    torch.save([shared, shared[1:3], shared.view(-1)], path)
    whole, rows, flat = torch.load(path)
    whole.zero_()
    assert not rows.any() and not flat.any() and rows.data_ptr() == flat[4:].data_ptr()

    torch.save(nn.Linear(4, 2).cuda().state_dict(), path)
    mapped = torch.load(path, mmap=True, map_location="cpu")
    model = nn.Linear(4, 2, device="cuda:1")
    model.load_state_dict(mapped)
    torch.testing.assert_close(model(values.to(second)).cpu(), values @ mapped["weight"].t() + mapped["bias"])
    torch.save(model, path)
    whole_model = torch.load(path, weights_only=False)
    assert torch.equal(whole_model(values.to(second)), model(values.to(second)))
    with torch.serialization.safe_globals([nn.Linear]):
        assert whole_model.weight.device == second
