"""What a tensor is: the uneven placement, its dispatch rules, parallel layers, gradient sync."""

from lightning_ntp.dtensor import dispatch, redistribute

dispatch.install()
redistribute.install()
