"""RNN, LSTM and GRU with packed sequences, both directions, dropout off, against the CPU."""

import copy

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence, pad_sequence

torch.backends.cudnn.allow_tf32 = False
torch.manual_seed(0)
sequences = [torch.randn(length, 5) for length in (7, 3, 5, 1)]
lengths = torch.tensor([len(sequence) for sequence in sequences])  # on the CPU, as pack_padded_sequence wants
padded = pad_sequence(sequences, batch_first=True)


def run(network, device, states=None):
    x = padded.clone().to(device).requires_grad_()
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    assert isinstance(packed, PackedSequence) and packed.data.device.type == device
    output, state = network(packed, states)
    output, output_lengths = pad_packed_sequence(output, batch_first=True, padding_value=-1.0)
    assert torch.equal(output_lengths, lengths)
    state = state if isinstance(state, tuple) else (state,)
    (output.square().mean() + sum(part.sum() for part in state)).backward()
    return output, *state, x.grad, *[parameter.grad for parameter in network.parameters()]


for kind in (nn.RNN, nn.LSTM, nn.GRU):
    for options in ({}, {"bidirectional": True, "num_layers": 2}, {"bias": False}):
        reference = kind(5, 6, batch_first=True, **options)
        network = copy.deepcopy(reference).cuda()
        network.flatten_parameters()
        for ours, theirs in zip(run(network, "cuda"), run(reference, "cpu"), strict=True):
            torch.testing.assert_close(ours.detach().cpu(), theirs.detach(), rtol=1e-3, atol=1e-5)

lstm = nn.LSTM(5, 6, proj_size=3)
x, h, c = torch.randn(4, 2, 5), torch.randn(1, 2, 3), torch.randn(1, 2, 6)
expected, (expected_h, expected_c) = lstm(x, (h, c))
output, (out_h, out_c) = copy.deepcopy(lstm).cuda()(x.cuda(), (h.cuda(), c.cuda()))
for ours, theirs in ((output, expected), (out_h, expected_h), (out_c, expected_c)):
    torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-3, atol=1e-5)

cell = nn.GRUCell(5, 6)
hidden, on_gpu = torch.zeros(2, 6), torch.zeros(2, 6, device="cuda")
cuda_cell = copy.deepcopy(cell).cuda()
for step in x:
    hidden, on_gpu = cell(step, hidden), cuda_cell(step.cuda(), on_gpu)
torch.testing.assert_close(on_gpu.cpu(), hidden, rtol=1e-3, atol=1e-5)
try:
    copy.deepcopy(lstm).cuda()(x)
except RuntimeError as error:
    assert "same device" in str(error), error
else:
    raise AssertionError("an LSTM on the GPU took an input on the CPU")
try:
    pack_padded_sequence(padded.cuda(), lengths.cuda(), batch_first=True, enforce_sorted=False)
except RuntimeError as error:
    assert "'lengths' argument should be a 1D CPU int64 tensor" in str(error), error
