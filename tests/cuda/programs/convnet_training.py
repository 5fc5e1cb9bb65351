"""A small ResNet's training: convolutions, BatchNorm, channels_last, evaluation; against the CPU."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

torch.backends.cudnn.allow_tf32 = False
torch.backends.cudnn.benchmark = True


class Block(nn.Module):
    def __init__(self, inside, outside, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, padding=1, bias=False, groups=2)
        self.bn2 = nn.BatchNorm2d(outside)
        self.down = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)), inplace=True)
        return F.relu(self.bn2(self.conv2(out)) + self.down(x))


torch.manual_seed(0)
reference = nn.Sequential(
    Block(3, 8, 1), nn.MaxPool2d(2), Block(8, 16, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)
)
images, labels = torch.randn(4, 8, 3, 16, 16), torch.randint(0, 10, (4, 8))


def train(model, memory_format):
    device = next(model.parameters()).device
    model = model.to(memory_format=memory_format).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4, nesterov=True)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1).to(device)
    running = torch.zeros((), device=device)
    for x, y in zip(images, labels, strict=True):
        x, y = x.to(device, memory_format=memory_format), y.to(device)
        loss = criterion(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        running += loss.detach()
    model.eval()
    with torch.inference_mode():
        logits = torch.cat([model(x.to(device)) for x in images])
    return running, logits, model.state_dict()


copies = [copy.deepcopy(reference).cuda(index) for index in range(2)]
expected_loss, expected_logits, expected_state = train(reference, torch.contiguous_format)
for model, memory_format in zip(copies, (torch.contiguous_format, torch.channels_last), strict=True):
    loss, logits, state = train(model, memory_format)
    torch.testing.assert_close(loss.cpu(), expected_loss, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(logits.cpu(), expected_logits, rtol=1e-2, atol=1e-2)
    assert state["0.bn1.num_batches_tracked"].item() == 4
    for name, value in state.items():
        torch.testing.assert_close(value.cpu(), expected_state[name], rtol=1e-2, atol=1e-3)
    accuracy = (logits.argmax(1).cpu() == labels.flatten()).float().mean()
    assert 0 <= accuracy <= 1 and model[0].conv1.weight.is_contiguous(memory_format=memory_format)
