"""Losses of whole answers: preference pairs, labelled answers, and reward models.

What a docstring does not describe has one meaning in all of them, per pair or response:

    valid               bool, False where a slot holds none, and the result is 0; None
                        where every slot holds one
    policy_chosen       log pi(y_c) (nats) of the chosen response, differentiable
    policy_rejected     log pi(y_r) (nats) of the rejected one, differentiable
    reference_chosen    log ref(y_c) (nats), held constant
    reference_rejected  log ref(y_r) (nats), held constant
    chosen_log_ratio    c = log(pi(y_c) / ref(y_c)) (nats), differentiable
    rejected_log_ratio  r = log(pi(y_r) / ref(y_r)) (nats), differentiable
    margin              h (nats), such as `preference.log_ratio_margin`, differentiable
    beta                > 0 (per nat)

Results are float32.
"""
