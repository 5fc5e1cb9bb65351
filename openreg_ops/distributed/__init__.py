"""`torch.distributed` on the device.

process_group.py  the c10d backend "occl"
sharding.py       how our own operators handle DTensors
attention.py      scaled_dot_product_attention on DTensors
random.py         random operators on DTensors
"""
