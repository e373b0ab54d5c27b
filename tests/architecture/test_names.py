"""One idea has one name, and one default, in losses, algorithms and dialects."""

import inspect
from collections import defaultdict
from importlib import import_module
from pkgutil import walk_packages
from typing import get_args

from jaxrl_post import algorithms, losses

# Meaning of each hyperparameter. A new one is added here, after a look at whether its
# idea has a name already.
GLOSSARY = {
    "accept_k1_loss": "take kl.k1 as a loss all the same",
    "aggregation": "reduction of the loss in place of the algorithm's own",
    "alpha": "exponent of a divergence, or of a length",
    "anchor": "whose log-probs the policy's ratio is to",
    "axis_name": "mesh axes over which arrays are split",
    "beta": "scale of implicit rewards, or share of a mixture (GKD)",
    "bootstrap": "value of the state after a sequence that was cut",
    "bootstrap_truncated": "whether a sequence that was cut has a value after it",
    "bound": "whether a penalty is capped",
    "bounded": "whether process rewards are divided by the largest return",
    "buffer": "tokens over which a penalty grows",
    "by_token": "whether a token's loss moves that token alone",
    "cap": "largest importance weight",
    "center": "whether a mean is removed",
    "centering": "weight of the squared sum of a pair's rewards",
    "chunk_bytes": "of float32 logits held at a time",
    "clip_high": "the ratio, or its logarithm, is clipped this much above",
    "clip_low": "the ratio, or its logarithm, is clipped this much below",
    "coefficient": "weight of a critic's loss",
    "correction": "of what sampler and trainer disagree on",
    "cov_range": "smallest and largest covariance that may be dropped",
    "ddof": "variances are over n - ddof",
    "decay": "of a weight, a version of age",
    "denominator": "constant by which a sequence's sum is divided, in tokens",
    "desirable_weight": "of KTO",
    "divergence": "a function that gives one",
    "dual_clip": "largest ratio that a negative advantage meets",
    "entropy_coefficient": "weight of the entropy in the loss",
    "epsilon": "added to a standard deviation or variance",
    "epsilon_inside": "whether epsilon stands under the root",
    "fraction": "share of the tokens that are chosen",
    "gamma": "discount",
    "gaps": "what happens between counted tokens",
    "high": "upper bound",
    "horizon": "of a controller, in samples",
    "k": "tokens, or samples, that are taken",
    "k_negative": "power of VESPO's kernel, negative advantages",
    "k_positive": "power of VESPO's kernel, positive advantages",
    "kl_coefficient": "weight of a KL in the loss or in the reward",
    "kl_estimator": "of the KL to the reference",
    "kl_weights": "importance weights of that KL, with a gradient",
    "label_smoothing": "share of labels taken to be wrong",
    "lambda_": "of GAE",
    "lambda_negative": "rate of VESPO's kernel, negative advantages",
    "lambda_positive": "rate of VESPO's kernel, positive advantages",
    "low": "lower bound",
    "margin_of": "margin of the log-probs of a pair",
    "max_age": "in versions",
    "max_length": "in tokens",
    "max_log_ratio": "clamp of a log-ratio",
    "max_penalty": "largest penalty",
    "max_value": "clamp of a KL estimate",
    "method": "of solving a recurrence",
    "moments": "to whiten by",
    "n": "samples of best-of-n",
    "needs_reference": "whether reference log-probs are read",
    "ngram": "tokens of a repeated piece",
    "nll_weight": "weight of the chosen answer's likelihood",
    "num_prompts": "of the batch",
    "num_steps": "of a controller since its last call",
    "of_means": "of log-probs a token, not summed",
    "parts": "into which the batch is split",
    "penalty": "at the maximum length",
    "policy_loss": "a policy term",
    "policy_version": "of the policy's parameters",
    "process_weight": "of process rewards next to outcomes",
    "proximal_version": "of the proximal policy's parameters",
    "quantile": "share of the tokens that are left out",
    "ratio_high": "upper bound of the ratio itself, without gradient",
    "ratio_low": "lower bound of the ratio itself, without gradient",
    "ratio_level": "whether a ratio is of a token or of a sequence",
    "reads": "what advantages are made of",
    "reduction": "from a value a token to a metric",
    "scale": "factor",
    "single": "advantage of a group's only sample",
    "space": "in which log-probs are interpolated",
    "statistic": "of a sequence's divergences",
    "step": "of a controller",
    "tail": "what becomes of the tokens outside the top k",
    "target": "of a controller",
    "target_margin": "by how much a chosen answer should be ahead",
    "tau": "temperature of a blend of two losses",
    "tau_negative": "temperature of a gate, negative advantages",
    "tau_positive": "temperature of a gate, positive advantages",
    "temperature": "divides logits",
    "threshold": "largest divergence that is not stopped",
    "token_choice": "which tokens keep their policy loss",
    "undesirable_weight": "of KTO",
    "value_clip": "how far a value may move",
    "value_lambda": "of the critic's targets",
    "weights": "of reward components",
    "whiten": "whether advantages are whitened",
    # Parameters of the host's arithmetic in staleness.capacity.
    "accepted": "samples that wait",
    "batch_size": "samples of a step",
    "concurrency": "samples in flight at most",
    "running": "samples in flight",
    "staleness": "versions that a sample may be old",
    "version": "of the parameters",
    # Parts of a composition.
    "advantages": "from rewards to advantages",
}
# Names of TRL, verl, NeMo RL and OpenRLHF for what has a name above.
SYNONYMS = {
    "cliprange": "clip_low, clip_high",
    "delta": "dual_clip or threshold",
    "epsilon_high": "clip_high or ratio_high",
    "epsilon_low": "clip_low",
    "kl_penalty": "kl_coefficient",
    "margin": "target_margin",
    "max_completion_length": "denominator",
    "max_ratio": "ratio_high",
    "ratio_clip_max": "clip_high",
    "ratio_clip_min": "clip_low",
}


def public_functions():
    for package in (losses, algorithms):
        for module in walk_packages(package.__path__, f"{package.__name__}."):
            if module.ispkg:
                continue
            loaded = import_module(module.name)
            for name in loaded.__all__:
                function = getattr(loaded, name)
                if inspect.isfunction(function):
                    yield f"{module.name}.{name}", function


def hyperparameters(function):
    parameters = inspect.signature(function).parameters.values()
    return [p for p in parameters if p.kind is p.KEYWORD_ONLY]


def shared_options(function):
    """Names of the options that a function takes together, as `SharedOptions`."""
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            yield from get_args(parameter.annotation)[0].__annotations__


def test_every_hyperparameter_has_a_name_of_the_glossary():
    used = set()
    for name, function in public_functions():
        for parameter in hyperparameters(function):
            said = SYNONYMS.get(parameter.name, "add it to the glossary")
            assert parameter.name in GLOSSARY, f"{name}({parameter.name}): {said}"
            used.add(parameter.name)
        used.update(shared_options(function))
    assert GLOSSARY.keys() == used
    assert GLOSSARY.keys().isdisjoint(SYNONYMS)


def test_shared_options_are_arguments_of_a_composition():
    taken = set(shared_options(algorithms.compose))
    assert taken == algorithms.SharedOptions.__annotations__.keys()
    assert taken >= set(shared_options(algorithms.ppo))
    # Without them an algorithm is what `compose` makes of its parts alone.
    assert not algorithms.SharedOptions.__required_keys__


def test_a_loss_and_the_algorithm_of_its_name_have_the_same_defaults():
    defaults = defaultdict(dict)
    for name, function in public_functions():
        for parameter in hyperparameters(function):
            if ".dialects." not in name and parameter.default is not parameter.empty:
                key = (name.rpartition(".")[2], parameter.name)
                defaults[key][name] = parameter.default
    differing = {
        key: found for key, found in defaults.items() if len(set(found.values())) > 1
    }
    assert not differing
    assert ("bradley_terry", "centering") in defaults
    assert len(defaults["gmpo", "clip_low"]) == 2
