"""Code that is added to a script."""

RATE_TRACKER = '''
class RateTracker:
    """Items a second; each reading is smoothed with the one before."""

    def __init__(self, smooth_factor=0.4):
        self.smooth_factor = smooth_factor
        self.started = self.last = time.time()
        self.total = self.count = 0.0
        self.smoothed = None

    def add(self, count):
        self.count += count

    def rate(self):
        now = time.time()
        if now > self.last:
            rate = self.count / (now - self.last)
            if self.smoothed is not None:
                rate += self.smooth_factor * (self.smoothed - rate)
            self.total, self.count = self.total + self.count, 0.0
            self.last, self.smoothed = now, rate
            return rate
        return 0.0

    def global_rate(self):
        passed = time.time() - self.started
        return (self.total + self.count) / passed if passed > 0 else 0.0
'''
