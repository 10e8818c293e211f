// What one answer counts while it streams; the server's own figures replace it at the end.
// A round is one pass of the model: the accepted tokens of a draft and one of its own.

export class Counts {
  constructor(now) {
    this.started = now;
    this.first = null; // when the first token came
    this.last = now;
    this.tokens = this.accepted = this.rounds = 0;
    this.begun = 0; // tokens of the first event
    this.stats = null; // the server's word
  }

  /** One event of the stream: what a round emitted, or the figures at the end. */
  add({ accepted = [], stats = null }, now) {
    if (stats) this.stats = stats;
    if (!accepted.length) return;
    if (this.first === null) this.begun = accepted.length;
    this.first ??= now;
    this.last = now;
    const taken = accepted.filter(Boolean).length;
    this.rounds += 1;
    this.tokens += accepted.length;
    this.accepted += taken;
  }

  /** Tokens per second behind the first event: reading the prompt is left out. Null if unknown. */
  pace() {
    const seconds = (this.last - this.first) / 1000;
    return this.first !== null && seconds > 0 ? (this.tokens - this.begun) / seconds : null;
  }

  /** The figures to show; null where nothing is known yet. */
  figures() {
    const { rounds, tokens, stats } = this;
    const seconds = (this.last - this.started) / 1000;
    return {
      tokens,
      rounds: stats?.rounds ?? rounds,
      tau: stats?.tau ?? (rounds ? tokens / rounds : null),
      speed: tokens && seconds > 0 ? tokens / seconds : null,
      share: tokens ? this.accepted / tokens : null,
      firstSeconds: this.first === null ? null : (this.first - this.started) / 1000,
      // what was tested and rejected is not streamed, so the shares come with the end
      perPosition: stats?.accepted_per_position ?? [],
    };
  }
}
