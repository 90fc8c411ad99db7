"use strict";
(() => {
  const { charts, runs } = JSON.parse(document.getElementById("data").textContent);
  const shown = runs.map(() => true);
  const tip = document.getElementById("tip");
  const EDGE = { left: 54, right: 14, top: 10, bottom: 24 };
  const COLORS = 8;
  let axis = "step";

  // ---- words

  const digits = (value, most) => value.toLocaleString("en-US", { maximumSignificantDigits: most });
  function short(value, most = 4) {
    const size = Math.abs(value);
    if (value === 0) return "0";
    if (size < 1e-3) return value.toExponential(most - 1).replace(/\.?0+e/, "e");
    for (const [unit, name] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]])
      if (size >= unit) return digits(value / (unit === 1e4 ? 1e3 : unit), most) + name;
    return digits(value, Math.max(most, size >= 1e3 ? 4 : 0));
  }
  function bytes(value, most = 4) {
    const power = value > 0 ? Math.min(4, Math.floor(Math.log2(value) / 10)) : 0;
    return value ? `${digits(value / 1024 ** power, most)} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}` : "0";
  }
  function time(seconds) {
    const [h, m] = [Math.floor(seconds / 3600), Math.floor(seconds / 60) % 60];
    if (h) return `${h} h${m ? ` ${m} min` : ""}`;
    if (m) return `${m} min${Math.round(seconds % 60) ? ` ${Math.round(seconds % 60)} s` : ""}`;
    return `${digits(seconds, 3)} s`;
  }
  const write = (unit, value, most) => (unit === "bytes" ? bytes(value, most) : short(value, most));
  const place = (x) => (axis === "step" ? `step ${digits(x, 15)}` : time(x));

  // ---- scales

  function ticks(low, high, count, base = 10) {
    const raw = (high - low) / count;
    const power = base ** Math.floor(Math.log(raw) / Math.log(base));
    const factors = base === 10 ? [1, 2, 5, 10] : [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024];
    const step = power * factors.find((factor) => power * factor >= raw * 0.999);
    const found = [];
    for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-9; at++) found.push(at * step);
    return found;
  }
  function timeTicks(high, count) {
    const steps = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400];
    const step = steps.find((seconds) => seconds >= high / count);
    return high < 5 || !step ? ticks(0, high, count) : Array.from({ length: high / step + 1 }, (_, n) => n * step);
  }
  function logTicks(low, high) {
    const [first, last] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))];
    const every = Math.ceil((last - first) / 5);
    const factors = high / low < 100 ? [1, 2, 3, 5] : high / low < 1e4 ? [1, 3] : [1];
    const found = [];
    for (let power = first; power <= last; power += every)
      for (const factor of factors) found.push(factor * 10 ** power);
    const inside = found.filter((value) => value >= low && value <= high);
    return inside.length > 2 ? inside : ticks(low, high, 4).filter((value) => value > 0);
  }

  // ---- drawing

  function make(name, attributes, parent, text) {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text !== undefined) element.textContent = text;
    return parent ? parent.appendChild(element) : element;
  }
  function add(parent, name, text, className) {
    const element = document.createElement(name);
    if (text !== undefined) element.textContent = text;
    if (className) element.className = className;
    return parent.appendChild(element);
  }
  const color = (number) => `c${number % COLORS}`;
  const round = (value) => Math.round(value * 10) / 10;

  class Chart {
    constructor(spec, parent) {
      this.spec = spec;
      this.log = false;
      const figure = add(parent, "figure");
      const caption = add(figure, "figcaption");
      add(caption, "b", spec.title);
      this.note = add(caption, "span", spec.note);
      this.toggle = add(caption, "button", "log");
      this.toggle.setAttribute("aria-pressed", "false");
      this.toggle.setAttribute("aria-label", `${spec.title}: logarithmic scale`);
      this.toggle.onclick = () => {
        this.log = !this.log;
        this.toggle.setAttribute("aria-pressed", this.log);
        this.draw();
      };
      this.svg = make("svg", { role: "img", tabindex: 0, "aria-label": `${spec.title} of each run` }, figure);
      this.svg.onpointermove = (event) => this.point(event);
      this.svg.onpointerdown = (event) => this.point(event);
      this.svg.onpointerleave = leave;
      this.svg.onblur = leave;
      this.svg.onkeydown = (event) => this.key(event);
    }

    /** Curves of the runs that are shown: [{run, number, name, line, low, high}]. */
    get curves() {
      return runs.flatMap((run, number) =>
        shown[number] ? run.charts[this.spec.key].map((curve, index) => ({ ...curve, run, number, index })) : []);
    }
    dots(run) {
      return this.spec.key === "loss" ? run.heldOut.filter((dot) => dot.loss !== null) : [];
    }

    /** What dashes mean, where a run has several curves here. */
    names() {
      const most = this.curves.map((curve) => curve.run.charts[this.spec.key]).sort((a, b) => b.length - a.length)[0];
      if (!most || most.length < 2) return "";
      const strokes = ["solid", "dashed", "dotted"];
      return most.map((curve, index) => `${strokes[Math.min(index, 2)]} ${curve.name}`).join(", ");
    }

    /** Where a curve is nearest to the pointer; undefined where its run was over by then. */
    index(curve, at) {
      const xs = curve.run[axis];
      const found = nearest(xs, at);
      return this.x(at) - this.x(xs[found]) > 12 ? undefined : found;
    }

    /** [least, greatest] to show. Single spikes of a noisy quantity may leave the chart; its smoothed line may not. */
    range() {
      const inside = [], noise = [];
      for (const curve of this.curves) {
        inside.push(...curve.line);
        if (curve.low) noise.push(...curve.low, ...curve.high);
      }
      runs.forEach((run, number) => shown[number] && inside.push(...this.dots(run).map((dot) => dot.loss)));
      const usable = (value) => value !== null && (!this.log || value > 0);
      const sorted = noise.filter(usable).sort((a, b) => a - b);
      const rank = (share) => sorted[Math.round(share * (sorted.length - 1))];
      const all = inside.filter(usable);
      if (sorted.length) all.push(rank(0.005), rank(0.995));
      if (!all.length) return null;
      let low = all.reduce((a, b) => Math.min(a, b)), high = all.reduce((a, b) => Math.max(a, b));
      if (this.log) return [low / 1.1, high * 1.1];
      if (this.spec.zero) low = Math.min(0, low);
      if (low === high) [low, high] = low === 0 ? [0, 1] : [low - Math.abs(low) / 2, high + Math.abs(high) / 2];
      const room = (high - low) * 0.06;
      return [this.spec.zero && low === 0 ? 0 : low - room, high + room];
    }

    draw() {
      const { svg, spec } = this;
      const [width, height] = [svg.clientWidth, svg.clientHeight];
      svg.replaceChildren();
      this.ready = false;
      if (width <= EDGE.left + EDGE.right) return;
      svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
      const lines = this.curves.flatMap((curve) => curve.line);
      this.toggle.hidden = spec.unit !== "number" || !lines.some((value) => value > 0);
      this.note.textContent = [spec.note, this.names()].filter(Boolean).join("; ");
      const range = this.range();
      this.ready = range !== null;
      if (!range) {
        make("text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, svg, "nothing to show");
        return;
      }
      const [right, bottom] = [width - EDGE.right, height - EDGE.bottom];
      const most = Math.max(...runs.map((run, number) => (shown[number] ? run[axis].at(-1) : 0)), 1e-9);
      const grow = this.log ? Math.log : (value) => value;
      const [low, high] = range.map(grow);
      this.x = (value) => EDGE.left + (value / most) * (right - EDGE.left);
      this.y = (value) => bottom - ((grow(value) - low) / (high - low)) * (bottom - EDGE.top);
      this.back = (pixel) => Math.min(most, Math.max(0, ((pixel - EDGE.left) / (right - EDGE.left)) * most));
      this.grid(range, most, right, bottom);
      const clip = make("clipPath", { id: `clip-${spec.key}` }, svg);
      const [wide, tall] = [right - EDGE.left + 8, bottom - EDGE.top + 8];
      make("rect", { x: EDGE.left - 3, y: EDGE.top - 6, width: wide, height: tall }, clip);
      const inner = make("g", { "clip-path": `url(#clip-${spec.key})` }, svg);
      for (const curve of this.curves) if (curve.low) this.band(curve, inner);
      for (const curve of this.curves) this.line(curve, inner);
      runs.forEach((run, number) => shown[number] && this.dots(run).forEach((dot) =>
        this.spot(dot[axis], dot.loss, 4.5, number, inner)));
      this.marks = make("g", {}, svg);
    }

    grid([low, high], most, right, bottom) {
      const { svg, spec } = this;
      let values = this.log ? logTicks(low, high) : ticks(low, high, 4, spec.unit === "bytes" ? 1024 : 10);
      if (spec.unit === "count") values = values.filter(Number.isInteger);
      for (const value of values) {
        const y = round(this.y(value));
        make("line", { x1: EDGE.left, x2: right, y1: y, y2: y, class: "grid" }, svg);
        make("text", { x: EDGE.left - 8, y: y + 4, "text-anchor": "end" }, svg, write(spec.unit, value, 3));
      }
      make("line", { x1: EDGE.left, x2: right, y1: bottom, y2: bottom, class: "base" }, svg);
      const count = Math.max(2, Math.floor((right - EDGE.left) / 95));
      const found = axis === "step" ? ticks(0, most, count).filter(Number.isInteger) : timeTicks(most, count);
      for (const value of found) {
        const x = round(this.x(value));
        const anchor = x > right - 20 ? "end" : "middle";
        make("text", { x, y: bottom + 17, "text-anchor": anchor }, svg, axis === "step" ? short(value) : time(value));
      }
    }

    spot(x, y, r, number, parent) {
      make("circle", { cx: round(this.x(x)), cy: round(this.y(y)), r, class: `dot ${color(number)}` }, parent);
    }

    line(curve, parent) {
      const xs = curve.run[axis];
      let path = "", last = null;
      curve.line.forEach((value, index) => {
        if (value === null || (this.log && value <= 0)) return;
        last = `${round(this.x(xs[index]))} ${round(this.y(value))}`;
        path += `${path ? "L" : "M"}${last}`;
      });
      // a single point shows as the round cap of a line of no length
      if (last && !path.includes("L")) path += `L${last}`;
      make("path", { d: path, class: `curve ${color(curve.number)} n${Math.min(curve.index, 2)}` }, parent);
    }

    band(curve, parent) {
      const xs = curve.run[axis];
      const floor = this.log ? Number.MIN_VALUE : -Infinity;
      const there = (index) => curve.low[index] !== null && curve.high[index] > floor;
      const kept = curve.low.map((_, index) => index).filter(there);
      const limit = (value) => Math.min(1e4, Math.max(-1e4, round(this.y(Math.max(value, floor)))));
      const points = [
        ...kept.map((index) => `${round(this.x(xs[index]))} ${limit(curve.high[index])}`),
        ...kept.reverse().map((index) => `${round(this.x(xs[index]))} ${limit(curve.low[index])}`),
      ];
      if (points.length) make("path", { d: `M${points.join("L")}Z`, class: `band ${color(curve.number)}` }, parent);
    }

    // ---- pointing

    point(event) {
      if (!this.ready) return;
      const box = this.svg.getBoundingClientRect();
      this.at = this.back(event.clientX - box.left);
      hover(this, event.clientX, event.clientY);
    }

    key(event) {
      const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!way || !this.ready) return;
      event.preventDefault();
      const box = this.svg.getBoundingClientRect();
      const now = this.at === undefined ? (way > 0 ? 0 : Infinity) : this.at;
      const xs = runs.filter((_, number) => shown[number]).flatMap((run) => run[axis]);
      const next = xs.filter((x) => way * (x - now) > 0).sort((a, b) => way * (a - b))[0];
      if (next !== undefined) this.at = next;
      hover(this, box.left + this.x(this.at ?? 0), box.top + 40);
    }

    mark(at) {
      if (!this.ready) return;
      this.marks.replaceChildren();
      const x = round(this.x(Math.min(at, this.back(Infinity))));
      make("line", { x1: x, x2: x, y1: EDGE.top, y2: this.svg.clientHeight - EDGE.bottom, class: "hair" }, this.marks);
      for (const curve of this.curves) {
        const index = this.index(curve, at);
        const value = curve.line[index] ?? null;
        if (value === null || (this.log && value <= 0)) continue;
        this.spot(curve.run[axis][index], value, 4, curve.number, this.marks);
      }
    }

    tell(at) {
      tip.replaceChildren();
      add(tip, "b", place(axis === "step" ? Math.round(at) : at));
      const say = (number, name, text, extra) => {
        const row = add(tip, "div");
        add(row, "i", undefined, color(number));
        add(row, "span", name);
        add(row, "strong", text);
        if (extra) add(row, "small", extra);
      };
      const { unit } = this.spec;
      for (const curve of this.curves) {
        const index = this.index(curve, at);
        if (index === undefined) continue;
        const [value, low, high] = [curve.line[index], curve.low?.[index] ?? null, curve.high?.[index] ?? null];
        const name = curve.name && curve.run.charts[this.spec.key].length > 1 ? ` · ${curve.name}` : "";
        let span = "";
        if (low !== null && low !== high) span = `${write(unit, low)} to ${write(unit, high)}`;
        else if (low !== null && low !== value) span = `unsmoothed ${write(unit, low)}`;
        say(curve.number, curve.run.label + name, value === null ? "not finite" : write(unit, value, 5), span);
      }
      runs.forEach((run, number) => {
        if (!shown[number]) return;
        const dot = this.dots(run).find((one) => Math.abs(this.x(one[axis]) - this.x(at)) < 9);
        if (dot) say(number, `${run.label} · held-out, step ${digits(dot.step, 15)}`, write(unit, dot.loss, 5));
      });
    }
  }

  function nearest(xs, at) {
    let [low, high] = [0, xs.length - 1];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (xs[middle] < at) low = middle + 1;
      else high = middle;
    }
    return low > 0 && at - xs[low - 1] < xs[low] - at ? low - 1 : low;
  }

  function hover(chart, x, y) {
    all.forEach((other) => other.mark(chart.at));
    chart.tell(chart.at);
    tip.hidden = false;
    const { width, height } = tip.getBoundingClientRect();
    const beside = x + 16 + width < innerWidth - 4 ? x + 16 : x - 16 - width;
    tip.style.left = `${Math.max(4, Math.min(beside, innerWidth - width - 4))}px`;
    tip.style.top = `${Math.max(4, y - height - 14 > 4 ? y - height - 14 : y + 22)}px`;
  }
  function leave() {
    tip.hidden = true;
    all.forEach((chart) => chart.marks?.replaceChildren());
  }

  // ---- the page

  const main = document.getElementById("charts");
  const all = charts.map((spec) => new Chart(spec, main));
  const draw = () => { leave(); all.forEach((chart) => chart.draw()); };

  const legend = document.getElementById("legend");
  legend.hidden = runs.length < 2;
  runs.forEach((run, number) => {
    const button = add(legend, "button");
    add(button, "i", undefined, color(number));
    button.append(run.label);
    button.setAttribute("aria-pressed", "true");
    button.onclick = () => {
      shown[number] = !shown[number];
      button.setAttribute("aria-pressed", shown[number]);
      draw();
    };
  });

  const choices = ["step", "seconds"].map((name) => {
    const button = add(document.getElementById("axis"), "button", name === "step" ? "step" : "time");
    button.onclick = () => {
      axis = name;
      choices.forEach((other) => other.setAttribute("aria-pressed", other === button));
      draw();
    };
    button.setAttribute("aria-pressed", name === axis);
    return button;
  });

  let width = 0;
  new ResizeObserver(() => {
    if (main.clientWidth === width) return;
    width = main.clientWidth;
    draw();
  }).observe(main);
})();
