CLASS_FILE_PATH_MAPPING = {"Lamp": "bfcl_eval.apis.lamp"}
MULTI_TURN_FUNC_DOC_FILE_MAPPING = {"Lamp": "lamp.json"}
STATELESS_CLASSES = []
