"""The reward as OpenRLHF loads it: --remote_rm_url examples/rewards/openrlhf.py

BATCHWRIGHT_REWARDS names the TOML file. The labels (--label_key) are the ground truth. A missing
reward stops the run, unless `missing` in the file is a number.
"""

from batchwright.integrations.openrlhf import reward_func

__all__ = ["reward_func"]
