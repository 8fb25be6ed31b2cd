"""Documents: text in, ordered passages out. Knows neither the model nor HTTP."""
