"""Balance a pole with PPO: a loop of your own, whose data the policy makes while it is trained.

    pip install gymnasium
    python docs/examples/ppo.py

Schulman et al., "Proximal Policy Optimization Algorithms", 2017. An episode ends after 500 steps at the latest. Each
epoch plays one round of episodes and learns from it in four passes. What is left of a round is in every checkpoint, so
a killed run continues within it, and ends with the same weights: a round is played at once, and torch's generator
seeds it. `result.resume` lists the loader all the same, since Heliograph cannot know what else it draws from.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gymnasium
import heliograph as h
import torch
from torch import Tensor, nn
from torch.distributions import Categorical

EPISODES, PASSES, BATCH, ROUNDS = 16, 4, 256, 25
DISCOUNT, TRACE, CLIP = 0.99, 0.95, 0.2

Samples = tuple[Tensor, ...]  # what was seen, the action, its log-probability, the return, the advantage


class Actor(h.Task):
    """A policy, and the value of what it sees."""

    def __init__(self) -> None:
        self.policy = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
        self.value = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1), nn.Flatten(0))

    def loss(self, seen: Tensor, action: Tensor, former: Tensor, value: Tensor, advantage: Tensor) -> Tensor:
        """Return the clipped loss of the policy, with that of the value and a part of the entropy."""
        choice = Categorical(logits=self.policy(seen))
        ratio = (choice.log_prob(action) - former).exp()
        gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
        return (
            -gain.mean() + 0.5 * nn.functional.smooth_l1_loss(self.value(seen), value) - 0.01 * choice.entropy().mean()
        )

    @torch.no_grad()
    def play(self) -> tuple[Samples, float]:
        """Play a round; return its samples, and how many steps an episode lasted on average."""
        poles = gymnasium.make_vec("CartPole-v1", EPISODES, vectorization_mode="vector_entry_point")
        seen, _ = poles.reset(seed=int(torch.randint(2**31, ())))
        steps, is_on = [], torch.ones(EPISODES, dtype=torch.bool)
        while is_on.any():
            state = torch.tensor(seen)
            choice = Categorical(logits=self.policy(state))
            action = choice.sample()
            steps.append((state, action, choice.log_prob(action), self.value(state), is_on))
            seen, _, has_fallen, is_over, _ = poles.step(action.numpy())
            is_on = is_on & ~torch.tensor(has_fallen | is_over)
        state, action, log_prob, value, was_on = (torch.stack(each) for each in zip(*steps, strict=True))
        advantage, later, ahead = torch.zeros_like(value), torch.zeros(EPISODES), torch.zeros(EPISODES)
        for step in reversed(range(len(steps))):  # a reward of 1 for each step
            later = (1 + DISCOUNT * ahead - value[step] + DISCOUNT * TRACE * later) * was_on[step]
            advantage[step], ahead = later, value[step] * was_on[step]
        samples = (
            state,
            action,
            log_prob,
            value + advantage,
            (advantage - advantage[was_on].mean()) / advantage[was_on].std(),
        )
        return tuple(each[was_on] for each in samples), was_on.sum().item() / EPISODES


class Rounds:
    """A loader: each epoch plays a round, and yields its samples in batches, in four passes."""

    def __init__(self, actor: Actor) -> None:
        self.actor = actor
        self.left: list[Samples] = []

    def __iter__(self) -> Iterator[Samples]:
        if not self.left:
            samples, _ = self.actor.play()
            orders = torch.cat([torch.randperm(len(samples[0])) for _ in range(PASSES)]).split(BATCH)
            self.left = [tuple(each[order] for each in samples) for order in orders]
        while self.left:
            yield self.left.pop(0)

    def state_dict(self) -> dict[str, Any]:
        """Return what is left of the round."""
        return {"left": list(self.left)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with it."""
        self.left = list(state["left"])


def main() -> None:
    """Train, and play before and after."""
    torch.manual_seed(0)
    actor = Actor()
    _, before = actor.play()
    checkpoint = h.Checkpoint("runs/ppo", every=h.Every(epochs=5), resume="auto")
    trainer = h.Trainer([h.RNGCapture(), h.GradientClipping(norm=0.5), checkpoint], device="cpu")
    optimizer = torch.optim.Adam([*actor.policy.parameters(), *actor.value.parameters()], lr=1e-3)
    with trainer.run(actor, Rounds(actor), optimizer=optimizer, epochs=ROUNDS) as run:
        for _ in run.epochs():
            for samples in run.batches():
                run.step(actor.loss(*samples))
    _, after = actor.play()
    print(f"{run.result.progress.epoch} rounds, {run.result.progress.steps} steps, resume {run.result.resume}")
    print(f"an episode lasted {before:.0f} steps before the training, and {after:.0f} after it")


if __name__ == "__main__":
    main()
