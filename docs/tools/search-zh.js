// Material 9.8 loses the last character of a Chinese query when it cuts the query into words ("权重同步" is searched as
// "权重" and "同"). One more character, which no page has, is lost instead.
const post = Worker.prototype.postMessage
Worker.prototype.postMessage = function (message, ...rest) {
  if (message && typeof message.data === "string")
    message = { ...message, data: message.data.replace(/\p{sc=Han}{3,}/gu, "$&〇") }
  return post.call(this, message, ...rest)
}
