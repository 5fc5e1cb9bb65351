"""DCGAN's two networks and optimizers, with weights_init, detach and BCELoss, against the CPU."""

import copy

import torch
from torch import nn

torch.backends.cudnn.allow_tf32 = False


def weights_init(module):
    if "Conv" in type(module).__name__:
        nn.init.normal_(module.weight.data, 0.0, 0.02)
    elif "BatchNorm" in type(module).__name__:
        nn.init.normal_(module.weight.data, 1.0, 0.02)
        nn.init.constant_(module.bias.data, 0)


torch.manual_seed(999)
generator = nn.Sequential(
    nn.ConvTranspose2d(10, 16, 4, 1, 0, bias=False),
    nn.BatchNorm2d(16),
    nn.ReLU(True),
    nn.ConvTranspose2d(16, 3, 4, 2, 1, bias=False),
    nn.Tanh(),
).apply(weights_init)
discriminator = nn.Sequential(
    nn.Conv2d(3, 16, 4, 2, 1, bias=False),
    nn.LeakyReLU(0.2, inplace=True),
    nn.Conv2d(16, 16, 1, bias=False),
    nn.BatchNorm2d(16),
    nn.LeakyReLU(0.2, inplace=True),
    nn.Conv2d(16, 1, 4, 1, 0, bias=False),
    nn.Sigmoid(),
).apply(weights_init)
real, noise = torch.randn(3, 8, 3, 8, 8), torch.randn(3, 8, 10, 1, 1)


def train(generator, discriminator, device):
    generator, discriminator = generator.to(device), discriminator.to(device)
    criterion = nn.BCELoss()
    optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=0.002, betas=(0.5, 0.999))
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=0.002, betas=(0.5, 0.999))
    history = []
    for images, z in zip(real.to(device), noise.to(device), strict=True):
        discriminator.zero_grad()
        label = torch.full((8,), 1.0, dtype=torch.float, device=device)
        error_real = criterion(discriminator(images).view(-1), label)
        error_real.backward()
        fake = generator(z)
        label.fill_(0.0)
        error_fake = criterion(discriminator(fake.detach()).view(-1), label)
        error_fake.backward()
        optimizer_d.step()
        generator.zero_grad()
        label.fill_(1.0)
        error_g = criterion(discriminator(fake).view(-1), label)
        error_g.backward()
        optimizer_g.step()
        history.append([error_real.item(), error_fake.item(), error_g.item()])
    return torch.tensor(history), fake.detach().cpu()


ours = train(copy.deepcopy(generator), copy.deepcopy(discriminator), "cuda:0")
theirs = train(generator, discriminator, "cpu")
torch.testing.assert_close(ours[0], theirs[0], rtol=1e-2, atol=1e-3)
torch.testing.assert_close(ours[1], theirs[1], rtol=2e-2, atol=5e-3)
