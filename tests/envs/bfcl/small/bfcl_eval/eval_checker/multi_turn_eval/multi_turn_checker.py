from collections import Counter


def state_checker(models, golds):
    return {"valid": all(models[name].level == golds[name].level for name in golds)}


def response_checker(said, expected, turn):
    return {"valid": not Counter(expected) - Counter(said)}
