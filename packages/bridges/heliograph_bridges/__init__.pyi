from .accelerate import AccelerateEngine as AccelerateEngine
