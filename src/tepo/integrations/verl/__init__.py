"""TEPO and every other objective inside verl 0.9; `plugin` is what `import verl` finds.

One key, with verl's own trainer, for objectives that read log-probs and advantages alone:

    actor_rollout_ref.actor.policy_loss.loss_mode=tepo_dapo algorithm.adv_estimator=tepo_dapo

With the trainer of `trainer`, whose loss has old and new entropies and the reference too, for all that verl can carry:

    trainer.v1.trainer_mode=tepo actor_rollout_ref.actor.policy_loss.loss_mode=tepo algorithm.adv_estimator=tepo
    actor_rollout_ref.actor.calculate_entropy=True

`tepo verl RECIPE` writes the whole command.
"""
