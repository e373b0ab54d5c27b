class Lamp:
    def _load_scenario(self, scenario, long_context=False):
        self.level = scenario["level"]
        self._long = long_context

    def dim(self, by, twice=False):
        if by < 0:
            raise ValueError("by must not be negative")
        self.level -= by * (1 + twice)
        return {"level": self.level}

    def look(self):
        return "bright" if self.level > 5 else "dark"

    def reset(self):
        self.level = 9
