"""Train a policy and a critic with a reference policy, a target network and a replay buffer, as one run.

Run `python several_models.py 10`, then `python several_models.py 20`: the second call continues at step 11. The same
works under torchrun, in another folder: each rank then has an environment and a replay buffer of its own.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

from torchtitan_lite import faults, log
from torchtitan_lite.checkpoint import CheckpointManager, PerRank, TrainState

CARTS, PUSHES, CAPACITY = 8, 4, 128


def push(actions):
    """Push each cart left or right; return its reward, which is highest at rest in the middle."""
    where = carts["where"]
    speed = 0.9 * where[:, 1:] + 0.4 * actions - 0.2 + 0.1 * torch.randn(CARTS, 1)
    carts["where"] = torch.cat([where[:, :1] + 0.1 * speed, speed], dim=1)  # a new tensor: a save keeps the old one
    carts["pushes"] += 1
    if carts["pushes"] % 50 == 0:  # the end of an episode
        carts["where"] = torch.randn(CARTS, 2)
    return -carts["where"].square().sum(dim=1, keepdim=True)


def remember(*columns):
    """Write the last transition of each cart into the replay buffer, in place."""
    replay["rows"][(replay["written"] + torch.arange(CARTS)) % CAPACITY] = torch.cat(columns, dim=1)
    replay["written"] += CARTS


def recall(at):
    """Return the transitions with these numbers: where, action, reward, and where after it."""
    return replay["rows"][at % CAPACITY].split([2, 1, 1, 2], dim=1)


def update(optimizer, loss):
    optimizer.zero_grad()
    (loss / ranks).backward()
    for parameter in optimizer.param_groups[0]["params"] if ranks > 1 else ():
        dist.all_reduce(parameter.grad)
    optimizer.step()  # waits by itself until no save reads the state
    faults.point("step", step=progress.step + 1)


steps, async_mode = int(sys.argv[1]), (sys.argv[2:] or ["async"])[0]
rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if ranks > 1:
    dist.init_process_group("gloo")
log.setup(rank)
faults.install(os.environ.get("TORCHTITAN_LITE_FAULT", ""), rank=rank)
torch.manual_seed(0)
sizes = {"policy": 2, "critic": 1, "reference": 2, "target": 1}
models = nn.ModuleDict({key: nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, n)) for key, n in sizes.items()})
policy, critic, reference, target = models.values()
reference.requires_grad_(False).load_state_dict(policy.state_dict())
target.requires_grad_(False).load_state_dict(critic.state_dict())
optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (policy, critic)]
progress = TrainState()
carts = {"where": torch.zeros(CARTS, 2), "pushes": 0}  # the environment: place and speed; the cursor of the rollout
replay = {"rows": torch.zeros(CAPACITY, 6), "written": 0}
states = {"train_state": progress, "carts": PerRank(carts), "replay": PerRank(replay)}
torch.manual_seed(rank)  # each rank explores in its own way; before load(), which restores the generators

with CheckpointManager.for_loop(
    model=models, optimizer=optimizers, states=states, folder="outputs_rl/checkpoint", interval=2, async_mode=async_mode
) as manager:
    manager.load()
    manager.reset()
    while progress.step < steps and not manager.preempted_by:
        manager.maybe_wait_for_staging()  # the rollout writes into the buffer, which a save may still read
        for _ in range(PUSHES):
            before, actions = carts["where"], torch.multinomial(policy(carts["where"]).softmax(1), 1)
            remember(before, actions, push(actions), carts["where"])
            faults.point("step", step=progress.step + 1)
        where, _, rewards, after = recall(torch.randint(min(replay["written"], CAPACITY), (64,)))
        critic_loss = (rewards + 0.9 * target(after) - critic(where)).square().mean()
        update(optimizers[1], critic_loss)
        for name, delayed in target.state_dict().items():
            delayed.lerp_(critic.state_dict()[name], 0.05)
        where, actions, rewards, after = recall(replay["written"] - 1 - torch.arange(PUSHES * CARTS))
        advantage = (rewards + 0.9 * critic(after) - critic(where)).detach()
        chosen, usual = policy(where).log_softmax(1), reference(where).log_softmax(1)
        distance = nn.functional.kl_div(usual, chosen, log_target=True, reduction="batchmean")
        loss = 0.1 * distance - (advantage * chosen.gather(1, actions.long())).mean()
        update(optimizers[0], loss)
        progress.step += 1
        if rank == 0:
            print(f"step {progress.step}: loss {loss.item():.9g} critic {critic_loss.item():.9g}", flush=True)
        manager.save(progress.step, force=progress.step == steps)  # all states are of this step

if ranks > 1:
    dist.barrier()  # a rank that leaves early would abort the others
    dist.destroy_process_group()
sys.exit(128 + manager.preempted_by if manager.preempted_by else 0)
