// A server and its model: requests, streams, and what it says when it refuses.

export class Server {
  /// `base` is empty for the server of the page itself.
  constructor(base, onKeyWanted) {
    this.base = base;
    this.key = "";
    this.onKeyWanted = onKeyWanted;
  }

  /// Sends a request; an error has the server's words.
  async send(path, body, signal) {
    const headers = { "Content-Type": "application/json" };
    if (this.key) headers.Authorization = `Bearer ${this.key}`;
    const options = { headers, signal, ...(body ? { method: "POST", body: JSON.stringify(body) } : {}) };
    let response;
    try {
      response = await fetch(this.base + path, options);
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Error(this.base
        ? `cannot reach ${this.base}; start it with --allow-origin ${location.origin}`
        : "cannot reach the server; is it still running?");
    }
    if (response.status === 401) this.onKeyWanted();
    if (!response.ok) {
      const told = await response.json().catch(() => null);
      throw new Error(told?.error?.message ?? `the server said ${response.status}`);
    }
    return response;
  }

  async ask(path, body, signal) {
    return (await this.send(path, body, signal)).json();
  }

  /// The parts of a streamed completion, as they come.
  async *complete(request, signal) {
    const response = await this.send("/v1/completions", request, signal);
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const data = part.replace(/^data: /, "");
        if (data === "[DONE]") return;
        const event = JSON.parse(data);
        if (event.error) throw new Error(event.error.message);
        yield event.choices[0];
      }
    }
  }
}
