"""`torch.distributed` on the device.

process_group.py  the c10d backend "occl"
nccl.py           the same backend as "nccl", under the name cuda
sharding.py       how our own operators handle DTensors
attention.py      scaled_dot_product_attention on DTensors
random.py         random operators on DTensors
"""
