"""The toy task, writing down in the log which samples each update trained on."""

from __future__ import annotations

import distributed_utils
from tests.resume.task import Toy


class Recorder(Toy):
    def train_step(self, samples):
        stats = super().train_step(samples)
        itr = self._train_iterator
        mine = [index for indices in itr.last_indices for index in indices]
        gathered = distributed_utils.all_gather_list(mine)
        indices = sorted(index for part in gathered for index in part)
        self.log_event("samples", epoch=itr.epoch, num_updates=self.get_num_updates(), indices=indices)
        return stats
