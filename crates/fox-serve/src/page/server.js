// A server and its model: requests, streaming, errors.

export class Server {
  /// `base` is empty for the server of the page itself.
  constructor(base, onKeyWanted) {
    this.base = base;
    this.key = "";
    this.onKeyWanted = onKeyWanted;
  }

  /// Sends a request; an error has the message of the server.
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
      const reply = await response.json().catch(() => null);
      throw new Error(reply?.error?.message ?? `the server answered ${response.status}`);
    }
    return response;
  }

  async ask(path, body, signal) {
    return (await this.send(path, body, signal)).json();
  }

  /// The chunks of a streamed completion.
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
