// Requests to the server. Errors are thrown with the message that the server gave.

const KEY = "longspan.key";

function headers(body) {
  const found = body === undefined ? {} : { "Content-Type": "application/json" };
  const key = sessionStorage.getItem(KEY);
  if (key) found.Authorization = `Bearer ${key}`;
  return found;
}

function askForKey() {
  const dialog = document.getElementById("key-dialog");
  document.getElementById("key-wrong").hidden = !sessionStorage.getItem(KEY);
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      sessionStorage.setItem(KEY, document.getElementById("key").value.trim());
      resolve();
    }, { once: true });
    if (!dialog.open) dialog.showModal();
  });
}

export async function send(method, path, body, options = {}) {
  const request = () => fetch(path, {
    method, headers: headers(body), body: body === undefined ? undefined : JSON.stringify(body), ...options,
  });
  let response = await request();
  while (response.status === 401 && !options.keepalive) {
    await askForKey();
    response = await request();
  }
  if (!response.ok) {
    const problem = await response.json().catch(() => null);
    const error = new Error(problem?.error?.message ?? `the server answered ${response.status}`);
    throw Object.assign(error, { status: response.status, code: problem?.error?.code });
  }
  return response;
}

export const get = async (path) => (await send("GET", path)).json();
export const post = async (path, body = {}, options) => (await send("POST", path, body, options)).json();

// The events of a stream, until `data: [DONE]`.
export async function* events(path, body) {
  const response = await send("POST", path, { ...body, stream: true });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  while (true) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n\n");
    rest = lines.pop();
    for (const line of lines) {
      const data = line.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw Object.assign(new Error(event.error.message), { code: event.error.code });
      yield event;
    }
  }
}

// A long analysis: `update` gets it after every poll, `cancel` stops it.
export class Job {
  constructor(path, body, update) {
    this.cancelled = false;
    this.finished = this.follow(path, body, update);
  }

  async follow(path, body, update) {
    const { id } = await post(path, body);
    this.id = id;
    for (let wait = 150; ; wait = Math.min(wait * 1.3, 1000)) {
      const job = await get(`/page/jobs/${id}`);
      if (job.state === "failed") throw new Error(job.error);
      update(job);
      if (job.state !== "running") return job;
      if (this.cancelled) await send("DELETE", `/page/jobs/${id}`);
      await new Promise((resolve) => { this.wake = resolve; setTimeout(resolve, wait); });
    }
  }

  cancel() {
    this.cancelled = true;
    this.wake?.();
  }
}
