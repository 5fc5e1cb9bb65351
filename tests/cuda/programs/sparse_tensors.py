"""Sparse tensors on a GPU: COO, CSR, products with gradients, sparse embeddings."""

import torch
from torch import nn

i = torch.tensor([[0, 1, 1, 2, 0], [2, 0, 2, 1, 2]])
v = torch.tensor([3.0, 4.0, 5.0, -1.0, 1.0])
dense = torch.zeros(3, 3).index_put_((i[0], i[1]), v, accumulate=True)
s = torch.sparse_coo_tensor(i.cuda(), v.cuda(), (3, 3))
assert s.is_cuda and s.is_sparse and s.layout == torch.sparse_coo and not s.is_coalesced() and s._nnz() == 5
assert torch.equal(s.to_dense().cpu(), dense) and s.coalesce()._nnz() == 4
assert torch.equal(s.coalesce().indices().cpu(), dense.to_sparse().indices())
assert torch.equal(s.cpu().to_dense(), dense) and torch.equal(s.to("cuda:1").to_dense().cpu(), dense)
assert torch.equal(torch.sparse_coo_tensor(i, v, (3, 3), device="cuda").to_dense().cpu(), dense)

matrix = torch.randn(3, 4)
torch.testing.assert_close(torch.sparse.mm(s, matrix.cuda()).cpu(), dense @ matrix)
torch.testing.assert_close((s @ matrix.cuda()).cpu(), dense @ matrix)
torch.testing.assert_close(torch.sparse.addmm(torch.ones(3, 4).cuda(), s, matrix.cuda()).cpu(), 1 + dense @ matrix)
torch.testing.assert_close((s + s).to_dense().cpu(), 2 * dense)
torch.testing.assert_close((s * 2).t().to_dense().cpu(), 2 * dense.t())
torch.testing.assert_close(torch.sparse.sum(s, dim=0).to_dense().cpu(), dense.sum(0))
softmax = torch.sparse.softmax(s.coalesce(), dim=1).to_dense().cpu()
torch.testing.assert_close(softmax, dense.masked_fill(dense == 0, -torch.inf).softmax(1).masked_fill(dense == 0, 0))
assert torch.equal(matrix.cuda().to_sparse().to_dense().cpu(), matrix)
masked = torch.ones(3, 3).cuda().sparse_mask(s.coalesce())
assert torch.equal(masked.to_dense().cpu(), (dense != 0).float())

weights, x = v.cuda().requires_grad_(), matrix.cuda().requires_grad_()
product = torch.sparse.mm(torch.sparse_coo_tensor(i.cuda(), weights, (3, 3)), x)
product.square().sum().backward()
cpu_v, cpu_x = v.clone().requires_grad_(), matrix.clone().requires_grad_()
(torch.zeros(3, 3).index_put((i[0], i[1]), cpu_v, accumulate=True) @ cpu_x).square().sum().backward()
torch.testing.assert_close(weights.grad.cpu(), cpu_v.grad)
torch.testing.assert_close(x.grad.cpu(), cpu_x.grad)

csr = dense.to_sparse_csr().cuda()
assert csr.is_cuda and csr.crow_indices().tolist() == dense.to_sparse_csr().crow_indices().tolist()
torch.testing.assert_close((csr @ matrix.cuda()).cpu(), dense @ matrix)
torch.testing.assert_close((csr @ matrix.cuda()[:, 0]).cpu(), dense @ matrix[:, 0])
assert torch.equal(csr.to_dense().cpu(), dense)

embeddings = [nn.Embedding(10, 3, sparse=True) for _ in range(2)]
embeddings[1].load_state_dict(embeddings[0].state_dict())
embeddings[0].cuda()
for embedding in embeddings:
    optimizer = torch.optim.SparseAdam(list(embedding.parameters()), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        embedding(torch.tensor([1, 4, 4], device=embedding.weight.device)).square().sum().backward()
        assert embedding.weight.grad.is_sparse
        optimizer.step()
torch.testing.assert_close(embeddings[0].weight.cpu(), embeddings[1].weight)
