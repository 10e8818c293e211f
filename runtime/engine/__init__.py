"""One round, and what surrounds it.

To understand EAGLE-3 with a dynamic tree and sampling, read, in this order:

 1. core/tree.py                        what is drafted in a round
 2. core/drafter.py                     the contract: Drafter, DraftState, RoundView, Outcome
 3. runtime/engine/engine.py            the round: Engine.step
 4. runtime/engine/scheduler.py         from a request to an active row, and to the next round
 5. runtime/engine/round.py             what a round knows before it drafts
 6. runtime/engine/round_drafter.py     a drafter's state, grown into a tree by a policy
 7. runtime/policies/dynamic_tree.py    the policy
 8. runtime/policies/beam.py            how it grows the tree
 9. drafters/features/eagle3.py                  the family: weights, loss, state
10. drafters/states/feature_state.py    its memory: true rows, drafted nodes, what comes after
11. runtime/engine/target_reader.py     the target's forward of root and nodes, and its KV cache
12. runtime/sampling/sampling.py        from logits to the target's distribution
13. runtime/verify/target_only.py       the rule for such trees: the target draws, drafts follow
14. runtime/verify/walk.py              the accepted path
15. runtime/engine/commit.py            what is emitted, where a row ends, what is learned from

The rest wraps these parts or stands beside them: lazy_drafter (rows that draft nothing cost
nothing), guard (a drafter that fails costs drafts, never an answer), early_pruning (a target that
drops nodes half-way through its layers), prefill (prompts in chunks), row_features (states that
are kept for training), request (the values).
"""
