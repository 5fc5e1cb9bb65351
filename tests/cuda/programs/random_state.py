"""Random numbers: generators, seeds, saved states, fork_rng, dropout."""

import torch
import torch.nn.functional as F

generator = torch.Generator("cuda").manual_seed(42)
a = torch.randn(1000, device="cuda", generator=generator)
state = generator.get_state()
b = torch.randn(1000, device="cuda", generator=generator)
generator.set_state(state)
assert torch.equal(torch.randn(1000, device="cuda", generator=generator), b) and not torch.equal(a, b)
assert torch.equal(torch.randn(1000, device="cuda", generator=torch.Generator(device="cuda:0").manual_seed(42)), a)
assert generator.device == torch.device("cuda:0") and generator.initial_seed() == 42
assert abs(a.cpu().mean()) < 0.2 and abs(a.cpu().std() - 1) < 0.1

torch.cuda.manual_seed_all(7)
everywhere = [torch.rand(100, device=f"cuda:{index}").cpu() for index in range(2)]
assert torch.equal(everywhere[0], everywhere[1])  # one seed, one algorithm
torch.manual_seed(7)
assert torch.equal(torch.rand(100, device="cuda").cpu(), everywhere[0])
assert torch.cuda.initial_seed() == 7

saved = torch.cuda.get_rng_state()
assert saved.dtype == torch.uint8 and saved.device.type == "cpu"
states = torch.cuda.get_rng_state_all()
assert len(states) == 2
first = torch.randint(0, 100, (50,), device="cuda")
on_second = torch.randperm(50, device="cuda:1")
torch.cuda.set_rng_state(saved)
assert torch.equal(torch.randint(0, 100, (50,), device="cuda"), first)
torch.cuda.set_rng_state_all(states)
assert torch.equal(torch.randperm(50, device="cuda:1"), on_second)
assert sorted(on_second.tolist()) == list(range(50)) and 0 <= first.min() and first.max() < 100

torch.cuda.set_rng_state(saved)
with torch.random.fork_rng(devices=[0]):
    torch.cuda.manual_seed(123)
    inside = torch.rand(10, device="cuda")
assert torch.equal(torch.randint(0, 100, (50,), device="cuda"), first)  # fork_rng restored the state
torch.cuda.manual_seed(123)
assert torch.equal(torch.rand(10, device="cuda"), inside)

x = torch.ones(10000, device="cuda", requires_grad=True)
torch.cuda.manual_seed(1)
y = F.dropout(x, 0.25)
y.sum().backward()
kept = y.detach().cpu() != 0
torch.testing.assert_close(y.detach().cpu(), kept / 0.75)
torch.testing.assert_close(x.grad.cpu(), kept / 0.75)
assert abs(kept.float().mean() - 0.75) < 0.03
torch.cuda.manual_seed(1)
assert torch.equal(F.dropout(x, 0.25), y)
torch.cuda.seed_all()
assert not torch.equal(F.dropout(x, 0.25), y)
try:
    torch.randn(2, generator=generator)
except RuntimeError as error:
    assert "cpu" in str(error) and "cuda" in str(error), error
else:
    raise AssertionError("a CPU tensor took numbers from a CUDA generator")
