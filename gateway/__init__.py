"""The HTTP edge: OpenAI's API, tenants, prompt assembly. Asynchronous, and never imports torch."""
